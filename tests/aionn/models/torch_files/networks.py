"""The networks, cut small: few layers, few channels, small pictures. Their operators are those of the large ones."""

from __future__ import annotations

import torch
import torchvision
import transformers
from cases import case, thinned
from torch import nn
from torchvision.models.mobilenetv3 import MobileNetV3
from torchvision.models.segmentation.deeplabv3 import DeepLabHead
from torchvision.models.swin_transformer import SwinTransformer

IMAGE = (1, 3, 64, 64)

# Convolutional networks


@case("resnet18", IMAGE)
@case("resnet18_int8", IMAGE, is_quantized=True)
@case("resnet18_program", IMAGE, exporter="program", opset=20)
def resnet18() -> nn.Module:
    return thinned(torchvision.models.resnet18(num_classes=320), 32)


@case("mobilenet_v3", IMAGE)
@case("mobilenet_v3_int8", IMAGE, is_quantized=True)
def mobilenet_v3() -> nn.Module:
    return thinned(torchvision.models.mobilenet_v3_small(num_classes=160), 16)


@case("efficientnet_b0", IMAGE)
def efficientnet_b0() -> nn.Module:
    return thinned(torchvision.models.efficientnet_b0(num_classes=320), 32)


@case("shufflenet_v2", IMAGE)
@case("shufflenet_v2_open", IMAGE, open={"x0": {0: "batch"}})
def shufflenet_v2() -> nn.Module:
    return torchvision.models.ShuffleNetV2([2, 3, 2], [8, 16, 32, 64, 64], num_classes=10)


class DeepLab(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        backbone: MobileNetV3 = torchvision.models.mobilenet_v3_large(dilated=True)
        self.features = thinned(backbone, 32).features
        self.head = thinned(nn.Sequential(DeepLabHead(960, 5, (12, 24, 36))), 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.head(self.features(x))
        return nn.functional.interpolate(found, size=x.shape[-2:], mode="bilinear", align_corners=False)


@case("deeplab_v3", IMAGE)
def deeplab_v3() -> nn.Module:
    return DeepLab()


# Transformers on pictures


class Logits(nn.Module):
    """The first result of a network of ``transformers``."""

    def __init__(self, net: nn.Module, *names: str) -> None:
        super().__init__()
        self.net = net
        self.names = names

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        given = dict(zip(self.names, arguments, strict=True))
        found: torch.Tensor = self.net(**given, return_dict=False)[0]
        return found


class Ids(nn.Module):
    """A network that reads token numbers and a mask."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(input_ids=ids, attention_mask=mask, return_dict=False)[0]
        return found


class One(nn.Module):
    """A network that reads one tensor."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x, return_dict=False)[0]
        return found


@case("mobilevit", IMAGE)
def mobilevit() -> nn.Module:
    return One(
        transformers.MobileViTForImageClassification(
            transformers.MobileViTConfig(
                image_size=64,
                hidden_sizes=[4, 4, 8],
                neck_hidden_sizes=[4, 4, 4, 4, 4, 4, 8],
                num_attention_heads=2,
                expand_ratio=2.0,
                num_labels=5,
            )
        )
    )


@case("vit", (1, 3, 32, 32))
@case("vit_program", (1, 3, 32, 32), exporter="program", opset=20)
@case("vit_int8", (1, 3, 32, 32), is_quantized=True)
def vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=10
    )


@case("swin", (1, 3, 32, 32))
def swin() -> nn.Module:
    return SwinTransformer(
        patch_size=[4, 4], embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=[4, 4], num_classes=10
    )


# Transformers on texts and sounds


def sentence() -> tuple[torch.Tensor, ...]:
    ids = torch.tensor([[5, 9, 33, 2, 61, 17, 40, 8, 0, 0]])
    return ids, (ids > 0).long()


@case("distilbert", inputs=sentence)
@case("distilbert_open", inputs=sentence, open={f"x{i}": {0: "batch", 1: "length"} for i in range(2)})
@case("distilbert_program", inputs=sentence, exporter="program", opset=20)
def distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=64, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=32
    )
    return Ids(transformers.DistilBertModel(config))


@case("whisper_encoder", (1, 8, 48))
def whisper_encoder() -> nn.Module:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(
        d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=32, num_mel_bins=8,
        max_source_positions=24, vocab_size=64, pad_token_id=0,
    )  # fmt: skip
    return One(WhisperEncoder(config))


SOUND = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "conv_dim": (8, 8, 8),
    "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


@case("wav2vec2", (1, 800))
def wav2vec2() -> nn.Module:
    return One(transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**SOUND, mask_time_prob=0.0)))


@case("conformer", (1, 800))
def conformer() -> nn.Module:
    config = transformers.Wav2Vec2ConformerConfig(
        **SOUND, mask_time_prob=0.0, conv_depthwise_kernel_size=7, position_embeddings_type="relative"
    )
    return One(transformers.Wav2Vec2ConformerModel(config))


# Recurrent layers


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)[0]
        return found


@case("lstm", (7, 1, 6))
def lstm() -> nn.Module:
    return Recurrent(nn.LSTM(6, 8))


@case("lstm_both_ways", (2, 7, 6))
def lstm_both_ways() -> nn.Module:
    return Recurrent(nn.LSTM(6, 8, num_layers=2, bidirectional=True, batch_first=True))


@case("gru", (7, 1, 6))
def gru() -> nn.Module:
    return Recurrent(nn.GRU(6, 8))


@case("gru_both_ways", (2, 7, 6))
def gru_both_ways() -> nn.Module:
    return Recurrent(nn.GRU(6, 8, num_layers=2, bidirectional=True, batch_first=True))


@case("rnn", (7, 2, 6))
def rnn() -> nn.Module:
    return Recurrent(nn.RNN(6, 8))


# Detectors


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1, size: int = 3) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.norm(self.convolution(x)))


class Detector(nn.Module):
    """A YOLO: two scales with a pyramid between them, boxes by anchors on a grid, and the choice of boxes."""

    CLASSES = 3

    def __init__(self, *, suppresses: bool) -> None:
        super().__init__()
        self.suppresses = suppresses
        self.stem = nn.Sequential(Block(3, 4, 2), Block(4, 8, 2), Block(8, 8))
        self.deep = nn.Sequential(Block(8, 16, 2), Block(16, 16))
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.joined = Block(64, 16, size=1)
        self.lateral = Block(16, 8, size=1)
        self.merged = Block(16, 8)
        self.heads = nn.ModuleList(
            [nn.Conv2d(8, 2 * (5 + self.CLASSES), 1), nn.Conv2d(16, 2 * (5 + self.CLASSES), 1)]
        )
        self.register_buffer("anchors", torch.tensor([[[6.0, 8], [12, 9]], [[20, 16], [30, 40]]]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fine = self.stem(x)
        deep = self.deep(fine)
        pooled = [deep]
        for _ in range(3):
            pooled.append(self.pool(pooled[-1]))
        deep = self.joined(torch.cat(pooled, 1))
        up = nn.functional.interpolate(self.lateral(deep), scale_factor=2.0, mode="nearest")
        fine = self.merged(torch.cat([up, fine], 1))
        found = []
        for level, (features, stride) in enumerate(((fine, 4), (deep, 8))):
            y = self.heads[level](features)
            height, width = y.shape[2:]
            y = y.view(1, 2, 5 + self.CLASSES, height, width).permute(0, 1, 3, 4, 2).sigmoid()
            rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            grid = torch.stack((columns, rows), 2).float()
            centre = (y[..., :2] * 2 - 0.5 + grid) * stride
            size = (y[..., 2:4] * 2) ** 2 * self.anchors[level].view(1, 2, 1, 1, 2)
            found.append(torch.cat((centre, size, y[..., 4:]), -1).view(1, -1, 5 + self.CLASSES))
        boxes = torch.cat(found, 1)
        if not self.suppresses:
            return (boxes,)
        boxes = boxes[0]
        corners = torch.cat((boxes[:, :2] - boxes[:, 2:4] / 2, boxes[:, :2] + boxes[:, 2:4] / 2), 1)
        scores, labels = (boxes[:, 5:] * boxes[:, 4:5]).max(1)
        kept = torchvision.ops.nms(corners, scores, 0.5)
        return corners[kept], scores[kept], labels[kept]


@case("yolo", (1, 3, 32, 32))
@case("yolo_program", (1, 3, 32, 32), exporter="program", opset=20)
def yolo() -> nn.Module:
    return Detector(suppresses=False)


@case("yolo_with_nms", (1, 3, 32, 32), count=3)
def yolo_with_nms() -> nn.Module:
    return Detector(suppresses=True)


# Control flow


@torch.jit.script
def repeated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)
    for step in range(4):
        x = torch.tanh(x @ weight + float(step))
        total = total + x
    return total


@torch.jit.script
def over_time(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    state = torch.zeros_like(x[0])
    found: list[torch.Tensor] = []
    for step in range(x.shape[0]):
        state = torch.tanh(x[step] + state @ weight)
        found.append(state)
    return torch.stack(found)


@torch.jit.script
def by_shape(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 1:
        y = x * 2.0
    else:
        y = x - 1.0
    return y


class Scripted(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.rand(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "loop":
            return repeated(x, self.weight)
        if self.kind == "loop_over_time":
            return over_time(x, self.weight)
        return by_shape(x @ self.weight)


for _kind, _shape in (("loop", (3, 6)), ("loop_over_time", (5, 2, 6)), ("branch", (3, 6))):
    case(_kind, _shape)(lambda kind=_kind: Scripted(kind))
