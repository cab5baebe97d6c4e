"""What ``GET /metadata`` says of the model that is served, in the names of KServe's V2 protocol."""

from __future__ import annotations

from jrec.json_values import JsonObject
from jrec.serving.candidates import CANDIDATES
from jrec.serving.model import Model


def described_model(model: Model) -> JsonObject:
    """The model's inputs and outputs.

    The datatype of a column of categories is BYTES: its values are texts, or what JSON and Arrow have in their place. A
    column of lists has two axes, the second of any length.
    """
    manifest = model.manifest
    inputs = [_tensor(name, own.datatype, [-1] * own.axes) for name, own in model.columns.items()]
    if model.takes_candidates:
        inputs.append({**_tensor(CANDIDATES, "BYTES", [-1, -1]), "parameters": {"optional": True}})
    return {
        "name": manifest.run,
        "versions": [manifest.id[:12]],
        "platform": "jrec",
        "inputs": inputs,
        "outputs": [_tensor(name, own.datatype, [-1] * own.axes) for name, own in model.outputs.items()],
    }


def _tensor(name: str, datatype: str, shape: list[int]) -> JsonObject:
    return {"name": name, "datatype": datatype, "shape": shape}
