"""Files of Keras networks: layers, recurrence, composed networks, applications cut small, in several schemes of quantisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from cases import CASES, Case, case, layers, network

# Layers

QUANTISED = ("float", "float16", "dynamic", "int8", "uint8", "int16x8")

network("dense", (1, 24), lambda: layers.Dense(16, "relu"), lambda: layers.Dense(5), schemes=QUANTISED)
network(
    "convolution", (1, 12, 12, 3),
    lambda: layers.Conv2D(8, 3, strides=2, padding="same", activation="relu6"),
    lambda: layers.DepthwiseConv2D(3, padding="same", activation="relu"),
    lambda: layers.Conv2D(12, 1),
    lambda: layers.GlobalAveragePooling2D(),
    lambda: layers.Dense(4, activation="softmax"),
    schemes=(*QUANTISED, "int8 float io", "int16x8 float io"),
)  # fmt: skip
network(
    "pooling", (1, 9, 9, 4),
    lambda: layers.MaxPooling2D(2, padding="same"), lambda: layers.AveragePooling2D(2),
    lambda: layers.Flatten(), lambda: layers.Dense(3),
    schemes=("float", "int8", "int16x8"),
)  # fmt: skip
network("dilated", (1, 12, 12, 2), lambda: layers.Conv2D(4, 3, dilation_rate=2), schemes=("float", "int8"))
network("grouped", (1, 8, 8, 8), lambda: layers.Conv2D(8, 3, groups=4, padding="same"))
network(
    "transposed", (1, 5, 5, 3),
    lambda: layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu"),
    schemes=("float", "int8", "int16x8"),
)  # fmt: skip
network("separable", (1, 8, 8, 3), lambda: layers.SeparableConv2D(6, 3), schemes=("float", "dynamic"))
network(
    "one_axis", (1, 20, 4), lambda: layers.Conv1D(6, 3, activation="elu"), lambda: layers.MaxPooling1D(2),
    lambda: layers.Conv1D(4, 3, padding="causal", dilation_rate=2),
)  # fmt: skip
network("volume", (1, 5, 6, 6, 2), lambda: layers.Conv3D(3, 3, padding="same", activation="relu"))
network("volume_valid", (1, 5, 7, 7, 2), lambda: layers.Conv3D(3, (2, 3, 3), strides=(1, 2, 2)))
network("volume_transposed", (1, 3, 4, 4, 2), lambda: layers.Conv3DTranspose(2, 2, strides=2))
network(
    "upsampling",
    (1, 4, 5, 3),
    lambda: layers.UpSampling2D(2, interpolation="bilinear"),
    lambda: layers.UpSampling2D(2),
)
network("cropping", (1, 8, 9, 2), lambda: layers.ZeroPadding2D(2), lambda: layers.Cropping2D(1))
network(
    "normalised", (1, 6, 8), lambda: layers.LayerNormalization(), lambda: layers.Dense(4, activation="gelu")
)
network(
    "batch_normalised", (1, 6, 6, 3), lambda: layers.BatchNormalization(), lambda: layers.Activation("swish")
)
network("groups_normalised", (1, 4, 4, 8), lambda: layers.GroupNormalization(4))
network(
    "activations",
    (2, 10),
    *[lambda a=a: layers.Activation(a) for a in ("selu", "softsign", "elu", "hard_sigmoid", "tanh")],
)
network("softplus", (2, 10), lambda: layers.Activation("softplus"), lambda: layers.Activation("mish"))
network(
    "prelu",
    (1, 4, 4, 3),
    lambda: layers.PReLU(shared_axes=[1, 2], alpha_initializer="random_uniform"),
    schemes=("float", "int8"),
)
network("leaky", (1, 4, 4, 3), lambda: layers.LeakyReLU(0.2), schemes=("float", "int8", "int16x8"))
network("dynamic_batch", (None, 6), lambda: layers.Dense(4, activation="tanh"), schemes=("float", "int8"))
CASES["dynamic_batch"].shapes = CASES["dynamic_batch_int8"].shapes = [(3, 6)]
network(
    "dynamic_length",
    (1, None, 3),
    lambda: layers.Conv1D(4, 3, padding="same"),
    lambda: layers.GlobalMaxPooling1D(),
)
CASES["dynamic_length"].shapes = [(1, 9, 3)]

# Recurrence

network("lstm", (1, 6, 4), lambda: layers.LSTM(5), schemes=("float", "dynamic"))
network("lstm_sequences", (1, 6, 4), lambda: layers.LSTM(5, return_sequences=True), lambda: layers.LSTM(3))
network("lstm_unrolled", (1, 3, 4), lambda: layers.LSTM(4, unroll=True))
network("lstm_bidirectional", (1, 5, 4), lambda: layers.Bidirectional(layers.LSTM(3)))
network("gru", (1, 6, 4), lambda: layers.GRU(5), schemes=("float", "dynamic"))
network("gru_unrolled", (1, 3, 4), lambda: layers.GRU(4, unroll=True, reset_after=False))
network("rnn", (1, 6, 4), lambda: layers.SimpleRNN(5))
network("lstm_convolution", (1, 3, 4, 4, 2), lambda: layers.ConvLSTM2D(2, 3, padding="same"))

# Composed networks


@case("embedding", ranges=[(0, 19)])
def _() -> Any:
    ids = tf.keras.Input((7,), batch_size=1, dtype="int32")
    x = layers.Embedding(20, 6)(ids)
    return tf.keras.Model(ids, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


@case("attention")
def _() -> Any:
    x = tf.keras.Input((5, 8), batch_size=1)
    y = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    return tf.keras.Model(x, layers.LayerNormalization()(layers.Add()([x, y])))


@case("attention_int8", scheme="int8 float io")
def _() -> Any:
    x = tf.keras.Input((5, 8), batch_size=1)
    y = layers.MultiHeadAttention(2, 4)(x, x)
    return tf.keras.Model(x, layers.Add()([x, y]))


for _scheme in ("float", "int8", "int16x8"):

    @case("branches" + ("" if _scheme == "float" else "_" + _scheme), scheme=_scheme)
    def _() -> Any:
        a, b = tf.keras.Input((6, 6, 3), batch_size=1), tf.keras.Input((6, 6, 3), batch_size=1)
        x = layers.Concatenate()([layers.Conv2D(3, 3, padding="same")(a), layers.Subtract()([a, b])])
        y = layers.Multiply()([x, layers.Activation("sigmoid")(x)])
        return tf.keras.Model([a, b], [layers.Add()([x, y]), layers.Maximum()([a, b])])


def cut(
    name: str, build: Callable[..., Any], side: int, last: str, scheme: str = "float", **more: Any
) -> None:
    """A Keras application as far as one of its layers."""

    def make() -> Any:
        whole = build(input_shape=(side, side, 3), weights=None, include_top=False, **more)
        source = tf.keras.Input((side, side, 3), batch_size=1)
        return tf.keras.Model(source, tf.keras.Model(whole.inputs, whole.get_layer(last).output)(source))

    CASES[name] = Case(make, scheme)


apps = tf.keras.applications
cut("mobilenet", apps.MobileNet, 32, "conv_pw_3_relu", alpha=0.25)
cut("mobilenet_int8", apps.MobileNet, 32, "conv_pw_4_relu", "int8", alpha=0.25)
cut("mobilenet_v2", apps.MobileNetV2, 32, "block_2_add", alpha=0.35)
cut("mobilenet_v2_int8", apps.MobileNetV2, 32, "block_3_project_BN", "int8", alpha=0.35)
cut("mobilenet_v2_int16x8", apps.MobileNetV2, 32, "block_2_add", "int16x8", alpha=0.35)
cut("efficientnet_dynamic", apps.EfficientNetB0, 32, "block2a_project_bn", "dynamic")
cut("convnext_dynamic", apps.ConvNeXtTiny, 32, "convnext_tiny_stage_0_block_0_layer_scale", "dynamic")
cut("densenet_int8", apps.DenseNet121, 32, "conv2_block1_concat", "int8")
cut("xception_float16", apps.Xception, 71, "block2_sepconv1_bn", "float16")
cut("nasnet_dynamic", apps.NASNetMobile, 32, "stem_bn1", "dynamic")
