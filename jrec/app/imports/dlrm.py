"""Weights of facebookresearch/dlrm's and TorchRec's DLRMs by their role, and as the parameters of ``jrec.nn.DLRM``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from jrec.app.imports.torch_file import SortedTensors
from jrec.errors import CheckpointError
from jrec.json_values import JsonObject

Layer = tuple[np.ndarray, np.ndarray]
"""Weight (outputs, inputs) and bias (outputs,) of a linear layer, in PyTorch's orientation."""
CrossLayer = tuple[np.ndarray, np.ndarray, np.ndarray]
"""V (rank, width), W (width, rank) and bias (width,) of ``x_0 * (W V x + b) + x``."""
Joined = Literal["dot", "concat", "dcn"]

_OTHER_EMBEDDINGS = "quotient-remainder (--qr-flag) and mixed-dimension (--md-flag) embeddings"
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_TABLE = {
    "facebook": re.compile(r"emb_l\.(\d+)\.weight"),
    "torchrec": re.compile(r"(?:.*\.)?embedding_bags\.(?:t_)?(.+)\.weight"),
}
_DENSE = {
    "facebook": {
        "bottom": re.compile(r"bot_l\.(\d+)\.(weight|bias)"),
        "top": re.compile(r"top_l\.(\d+)\.(weight|bias)"),
    },
    "torchrec": {
        "bottom": re.compile(r"(?:.*\.)?dense_arch\.model\._mlp\.(\d+)\._linear\.(weight|bias)"),
        "top": re.compile(r"(?:.*\.)?over_arch\.model\.0\._mlp\.(\d+)\._linear\.(weight|bias)"),
        "last": re.compile(r"(?:.*\.)?over_arch\.model\.1()\.(weight|bias)"),
        "cross": re.compile(r"(?:.*\.)?crossnet\.(V_kernels|W_kernels|bias)\.(\d+)"),
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DLRMWeights:
    """A DLRM's weights, in PyTorch's orientation and order.

    Attributes:
      source: "facebook" (facebookresearch/dlrm) or "torchrec".
      tables: By the table's name, "0", "1" … where it has none, (rows, dim) of any float dtype; in the order in which
        the interaction has them.
      bottom, top: The MLPs' layers.
      cross: The cross layers of DLRM-DCNv2; empty in others.
      interaction: "dot", "concat" or "dcn".
    """

    source: Literal["facebook", "torchrec"]
    tables: Mapping[str, np.ndarray]
    bottom: Sequence[Layer]
    top: Sequence[Layer]
    cross: Sequence[CrossLayer]
    interaction: Joined

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return next(iter(self.tables.values())).shape[1]

    @property
    def num_dense(self) -> int:
        """Dense features."""
        return self.bottom[0][0].shape[1]

    def model(self) -> JsonObject:
        """The keys of ``[model]`` of a run with these weights."""
        keys: JsonObject = {
            "embedding_dim": self.dim,
            "bottom_mlp": tuple(len(bias) for _, bias in self.bottom),
            "top_mlp": tuple(len(bias) for _, bias in self.top),
            "interaction": self.interaction,
        }
        if self.cross:
            keys |= {"cross_layers": len(self.cross), "cross_rank": len(self.cross[0][0])}
        return keys

    def parameters(self, order: Sequence[int]) -> dict[str, np.ndarray]:
        """Parameters of ``jrec.nn.DLRM`` by path, float32.

        Args:
          order: For each feature of the layout's order, the number of its table here.
        """
        columns = self._columns(order)
        arrays = {}
        for mlp, layers in (("bottom", self.bottom), ("top", self.top)):
            for number, (weight, bias) in enumerate(layers):
                kernel = weight[:, columns] if (mlp, number) == ("top", 0) else weight
                arrays[f"{mlp}.layers.{number}.kernel"] = kernel.T
                arrays[f"{mlp}.layers.{number}.bias"] = bias
        for number, (down, up, bias) in enumerate(self.cross):
            arrays[f"cross.down.{number}.kernel"] = down[:, columns].T
            arrays[f"cross.layers.{number}.kernel"] = up[columns].T
            arrays[f"cross.layers.{number}.bias"] = bias[columns]
        return {path: np.ascontiguousarray(array, np.float32) for path, array in arrays.items()}

    def _columns(self, order: Sequence[int]) -> np.ndarray:
        """For each input of jrec's top MLP, or cross network, which input it is here."""
        dim, vectors = self.dim, [0, *(1 + number for number in order)]
        if self.interaction != "dot":
            return np.concatenate([np.arange(dim) + dim * vector for vector in vectors])
        # The strict lower triangle, row by row; TorchRec has the strict upper one, row by row.
        count = len(vectors)
        place = np.zeros((count, count), np.int64)
        rows, columns = np.tril_indices(count, -1) if self.source == "facebook" else np.triu_indices(count, 1)
        place[rows, columns] = place[columns, rows] = np.arange(len(rows))
        ours = np.tril_indices(count, -1)
        our_vectors = np.array(vectors)
        return np.concatenate([np.arange(dim), dim + place[our_vectors[ours[0]], our_vectors[ours[1]]]])


def read_dlrm(tensors: Mapping[str, np.ndarray], *, interaction: Joined | None = None) -> DLRMWeights:
    """Finds a DLRM's weights among the tensors of a ``state_dict``.

    Args:
      tensors: By name, as ``read_state_dict`` reads them. Tables with names of their own enter the interaction in this
        order, so that ``SortedTensors`` may have only numbered tables.
      interaction: "dot" or "concat" where the widths do not tell; None to go by them.

    Raises:
      CheckpointError: If a weight is missing, of another shape, or of a variant that ``jrec.nn.DLRM`` lacks.
    """
    ordered = not isinstance(tensors, SortedTensors)
    tensors = _without_prefix(tensors)
    source = "facebook" if any(name.startswith("emb_l.") for name in tensors) else "torchrec"
    patterns, roles = _DENSE[source], dict[str, dict[tuple[str, ...], np.ndarray]]()
    tables: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if match := _TABLE[source].fullmatch(name):
            _add(tables, match[1], name, tensor)
            continue
        matches = [(role, match) for role, pattern in patterns.items() if (match := pattern.fullmatch(name))]
        if not matches:
            raise CheckpointError(
                f"the checkpoint has {name}, which no DLRM of facebookresearch/dlrm or TorchRec has that jrec knows;"
                f" {_OTHER_EMBEDDINGS}, learned weights of pooling (--weighted-pooling) and other models are not taken"
            )
        ((role, match),) = matches
        _add(roles.setdefault(role, {}), match.groups(), name, tensor)
    tables = _ordered(tables, ordered)
    bottom = _layers("bottom", roles.get("bottom", {}))
    top = _layers("top", roles.get("top", {})) + (_layers("last", roles["last"]) if "last" in roles else [])
    if not bottom or not top or not tables:
        missing = [
            name for name, present in (("tables", tables), ("bottom MLP", bottom), ("top MLP", top)) if not present
        ]
        raise CheckpointError(f"the checkpoint has no weights of a DLRM's {' and '.join(missing)}")
    cross = _cross_layers(roles.get("cross", {}))
    dims = {tensor.shape[1:] for tensor in tables.values()} | {(len(bottom[-1][1]),)}
    if len(dims) > 1:
        raise CheckpointError(
            f"tables and the last bottom layer have elements {sorted(map(list, dims))}, but must have one dim;"
            f" {_OTHER_EMBEDDINGS} are not taken"
        )
    if len(top[-1][1]) != 1:
        raise CheckpointError(f"the last top layer has {len(top[-1][1])} outputs; it must have one, the logit")
    width = (len(tables) + 1) * len(bottom[-1][1])
    if cross and {layer[0].shape[1] for layer in cross} | {top[0][0].shape[1]} != {width}:
        raise CheckpointError(f"cross layers and the first top layer must take all {width} elements of the vectors")
    joined: Joined = (
        "dcn" if cross else _interaction(len(tables) + 1, len(bottom[-1][1]), top[0][0].shape[1], interaction)
    )
    return DLRMWeights(source=source, tables=tables, bottom=bottom, top=top, cross=cross, interaction=joined)


def _without_prefix(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Names as they are without ``DistributedDataParallel``."""
    plain = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    if len(plain) < len(tensors):
        raise CheckpointError("the checkpoint has tensors of one name with and without 'module.'; save one model alone")
    return plain


def _add[Key](tensors: dict[Key, np.ndarray], key: Key, name: str, tensor: np.ndarray) -> None:
    if key in tensors:
        raise CheckpointError(f"the checkpoint has {name} and another tensor for the same; save one model alone")
    if tensor.dtype.name not in _FLOATS:
        raise CheckpointError(f"{name} is {tensor.dtype}, but weights are of {', '.join(_FLOATS)}; save it unquantized")
    tensors[key] = tensor


def _ordered(tables: Mapping[str, np.ndarray], ordered: bool) -> dict[str, np.ndarray]:
    """Numbered tables ("0", "cat_0") by their numbers, named "0", "1" …; others as they come, if that is an order."""
    numbers = {name: re.fullmatch(r"(?:cat_)?(\d+)", name) for name in tables}
    if not all(numbers.values()):
        if len(tables) > 1 and not ordered:
            raise CheckpointError(
                f"the tables {', '.join(tables)} interact in the model's order, which safetensors files do not keep;"
                " import the file that torch.save makes of model.state_dict()"
            )
        return dict(tables)
    by_number = {int(match[1]): tables[name] for name, match in numbers.items() if match}
    if sorted(by_number) != list(range(len(tables))):
        raise CheckpointError(f"the checkpoint has tables {sorted(by_number)}; some are missing between them")
    return {str(number): by_number[number] for number in range(len(tables))}


def _layers(role: str, tensors: Mapping[tuple[str, ...], np.ndarray]) -> list[Layer]:
    numbers = sorted({int(number or 0) for number, _ in tensors})
    layers = []
    for number in numbers:
        text = "" if role == "last" else str(number)
        weight, bias = tensors.get((text, "weight")), tensors.get((text, "bias"))
        if weight is None or bias is None or weight.ndim != 2 or bias.shape != weight.shape[:1]:
            raise CheckpointError(f"layer {number} of the {role} MLP lacks a weight and a bias that fit")
        if layers and weight.shape[1] != len(layers[-1][1]):
            raise CheckpointError(f"layer {number} of the {role} MLP does not take what the one before it gives")
        layers.append((weight, bias))
    return layers


def _cross_layers(tensors: Mapping[tuple[str, ...], np.ndarray]) -> list[CrossLayer]:
    layers = []
    for number in sorted({int(number) for _, number in tensors}):
        parts = [tensors.get((kind, str(number))) for kind in ("V_kernels", "W_kernels", "bias")]
        down, up, bias = (None if tensor is None else np.asarray(tensor) for tensor in parts)
        if down is None or up is None or bias is None or down.ndim != 2:
            raise CheckpointError(f"cross layer {number} lacks V, W or bias of a low-rank cross network")
        if down.shape != up.shape[::-1] or bias.size != len(up):
            raise CheckpointError(f"cross layer {number} has V, W and bias of a low-rank cross network that do not fit")
        layers.append((down, up, bias.reshape(-1)))
    return layers


def _interaction(count: int, dim: int, width: int, wanted: Joined | None) -> Joined:
    """How vectors are joined, by the inputs of the top MLP."""
    widths: dict[Joined, int] = {"dot": dim + count * (count - 1) // 2, "concat": dim * count}
    fitting: list[Joined] = [name for name, expected in widths.items() if expected == width and wanted in (None, name)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise CheckpointError(f"{count} vectors of {dim} give {width} inputs by dot and by concat; say --interaction")
    itself = dim + count * (count + 1) // 2
    why = "; products of vectors with themselves (--arch-interaction-itself) are not taken" if width == itself else ""
    raise CheckpointError(
        f"the top MLP has {width} inputs, but {count} vectors of {dim} give {widths['dot']} by dot and"
        f" {widths['concat']} by concat{why}"
    )
