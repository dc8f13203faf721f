"""The names of the attributes that an operator has in any version.

An operation with another attribute is not one of the extension: the attribute may change the operator's meaning.

Source: "Operator Schemas" of ONNX, operator sets 1 to 28.
"""

from __future__ import annotations

__all__ = ["ATTRIBUTE_NAMES"]

_LINES = """
Abs: consumed_inputs
Add: axis broadcast consumed_inputs
AffineGrid: align_corners
And: axis broadcast
ArgMax: axis keepdims select_last_index
ArgMin: axis keepdims select_last_index
Attention: is_causal kv_num_heads left_window_size q_num_heads qk_matmul_output_mode right_window_size scale softcap
    softmax_precision
AveragePool: auto_pad ceil_mode count_include_pad dilations kernel_shape pads strides
BatchNormalization: consumed_inputs epsilon is_test momentum spatial training_mode
BitCast: to
BitShift: direction
BlackmanWindow: output_datatype periodic
Cast: round_mode saturate to
CastLike: round_mode saturate
CausalConvWithState: activation
Ceil: consumed_inputs
Celu: alpha
CenterCropPad: axes
Clip: consumed_inputs max min
Col2Im: dilations pads strides
Compress: axis
Concat: axis
ConstantOfShape: value
Conv: auto_pad dilations group kernel_shape pads strides
ConvInteger: auto_pad dilations group kernel_shape pads strides
ConvTranspose: auto_pad dilations group kernel_shape output_padding output_shape pads strides
CumProd: exclusive reverse
CumSum: exclusive reverse
DFT: axis inverse onesided
DeformConv: dilations group kernel_shape offset_group pads strides
DepthToSpace: blocksize mode
DequantizeLinear: axis block_size output_dtype
Div: axis broadcast consumed_inputs
Dropout: consumed_inputs is_test ratio seed
Einsum: equation
Elu: alpha consumed_inputs
Equal: axis broadcast
Exp: consumed_inputs
EyeLike: dtype k
Flatten: axis
Floor: consumed_inputs
GRU: activation_alpha activation_beta activations clip direction hidden_size layout linear_before_reset output_sequence
Gather: axis
GatherElements: axis
GatherND: batch_dims
Gelu: approximate
Gemm: alpha beta broadcast transA transB
GlobalLpPool: p
Greater: axis broadcast
GridSample: align_corners mode padding_mode
GroupNormalization: epsilon num_groups stash_type
HammingWindow: output_datatype periodic
HannWindow: output_datatype periodic
HardSigmoid: alpha beta consumed_inputs
Hardmax: axis
InstanceNormalization: consumed_inputs epsilon
IsInf: detect_negative detect_positive
LRN: alpha beta bias size
LSTM: activation_alpha activation_beta activations clip direction hidden_size input_forget layout output_sequence
LayerNormalization: axis epsilon stash_type
LeakyRelu: alpha consumed_inputs
Less: axis broadcast
LinearAttention: chunk_size kv_num_heads q_num_heads scale update_rule
Log: consumed_inputs
LogSoftmax: axis
LpNormalization: axis p
LpPool: auto_pad ceil_mode dilations kernel_shape p pads strides
Max: consumed_inputs
MaxPool: auto_pad ceil_mode dilations kernel_shape pads storage_order strides
MaxRoiPool: pooled_shape spatial_scale
MaxUnpool: kernel_shape pads strides
Mean: consumed_inputs
MeanVarianceNormalization: axes
MelWeightMatrix: output_datatype
Min: consumed_inputs
Mod: fmod
Mul: axis broadcast consumed_inputs
Neg: consumed_inputs
NegativeLogLikelihoodLoss: ignore_index reduction
NonMaxSuppression: center_point_box
OneHot: axis
Or: axis broadcast
PRelu: consumed_inputs
Pad: mode paddings pads value
Pow: axis broadcast
QLinearConv: auto_pad dilations group kernel_shape pads strides
QuantizeLinear: axis block_size output_dtype precision saturate
RMSNormalization: axis epsilon stash_type
RNN: activation_alpha activation_beta activations clip direction hidden_size layout output_sequence
Range: stash_type
Reciprocal: consumed_inputs
ReduceL1: axes keepdims noop_with_empty_axes
ReduceL2: axes keepdims noop_with_empty_axes
ReduceLogSum: axes keepdims noop_with_empty_axes
ReduceLogSumExp: axes keepdims noop_with_empty_axes
ReduceMax: axes keepdims noop_with_empty_axes
ReduceMean: axes keepdims noop_with_empty_axes
ReduceMin: axes keepdims noop_with_empty_axes
ReduceProd: axes keepdims noop_with_empty_axes
ReduceSum: axes keepdims noop_with_empty_axes
ReduceSumSquare: axes keepdims noop_with_empty_axes
Relu: consumed_inputs
Reshape: allowzero consumed_inputs shape
Resize: antialias axes coordinate_transformation_mode cubic_coeff_a exclude_outside extrapolation_value
    keep_aspect_ratio_policy mode nearest_mode
ReverseSequence: batch_axis time_axis
RoiAlign: coordinate_transformation_mode mode output_height output_width sampling_ratio spatial_scale
RotaryEmbedding: interleaved num_heads rotary_embedding_dim
STFT: onesided
Scatter: axis
ScatterElements: axis reduction
ScatterND: reduction
Selu: alpha consumed_inputs gamma
Shape: end start
Shrink: bias lambd
Sigmoid: consumed_inputs
Slice: axes ends starts
Softmax: axis
SoftmaxCrossEntropyLoss: ignore_index reduction
SpaceToDepth: blocksize mode
Split: axis num_outputs split
Sqrt: consumed_inputs
Squeeze: axes
Sub: axis broadcast consumed_inputs
Sum: consumed_inputs
SwiGLU: alpha
Swish: alpha
Tanh: consumed_inputs
TensorScatter: axis mode
TfIdfVectorizer: max_gram_length max_skip_count min_gram_length mode ngram_counts ngram_indexes pool_int64s pool_strings
    weights
ThresholdedRelu: alpha
TopK: axis k largest sorted
Transpose: perm
Trilu: upper
Unique: axis sorted
Unsqueeze: axes
Upsample: height_scale mode scales width_scale
Xor: axis broadcast
"""

ATTRIBUTE_NAMES: dict[str, frozenset[str]] = {
    name: frozenset(names.split())
    for name, names in (line.split(":") for line in _LINES.strip().replace("\n    ", " ").splitlines())
}
"""The names by operator; operators without attributes are absent."""
