"""Networks, exported and run from folders in a process without PyTorch, do what eager does."""

import pytest
import torch
from exported import called_without_torch
from networks import NETWORKS
from networks.llama import Llama, greedy, specs

import fx2relax
from fx2relax import Tensor


def close(found, eager, exact):
    """Whether results are within 4 times eager's own distance from float64, plus 1e-6."""
    for ours, theirs, true in zip(found, eager, exact, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        bound = 4 * (theirs - true).abs().max() + 1e-6 * true.abs().max()
        assert (ours - true).abs().max() <= bound


def flat(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def compare(folder, model, functions, calls):
    """Export, save, call without PyTorch, and compare."""
    fx2relax.export(model, functions).save(folder)
    chosen = {n: f[0] if isinstance(f, tuple) else getattr(model, n) for n, f in functions.items()}
    with torch.no_grad():
        eager = [flat(chosen[name](**given)) for name, given in calls]
        model.double()
        wide = [
            {n: t.double() if t.is_floating_point() else t for n, t in g.items()} for _, g in calls
        ]
        exact = [flat(chosen[name](**given)) for (name, _), given in zip(calls, wide, strict=True)]
        model.float()
    for found, theirs, true in zip(called_without_torch(folder, calls), eager, exact, strict=True):
        close(found, theirs, true)


def test_resnet(tmp_path):
    model, (image,), _ = NETWORKS["resnet18"].build()
    spec = {"x": Tensor(("batch", *image.shape[1:]))}
    calls = [("forward", {"x": image}), ("forward", {"x": image[:1]})]
    compare(tmp_path / "artifact", model, {"forward": spec}, calls)


def test_vit(tmp_path):
    model, (image,), _ = NETWORKS["vit"].build()
    spec = {"pixel_values": Tensor(("batch", *image.shape[1:]))}
    function = (lambda pixel_values: model(pixel_values), spec)
    compare(tmp_path / "artifact", model, {"run": function}, [("run", {"pixel_values": image})])


def test_bert(tmp_path):
    model, (ids,), named = NETWORKS["bert"].build()
    length = fx2relax.Dim("length", max=64)  # as many positions as BERT knows
    spec = {n: Tensor(("batch", length), "int64") for n in ("input_ids", "attention_mask")}

    def run(input_ids, attention_mask):
        return model(input_ids, attention_mask=attention_mask)

    given = {"input_ids": ids, **named}
    short = {n: t[:1, :9].contiguous() for n, t in given.items()}
    compare(tmp_path / "artifact", model, {"run": (run, spec)}, [("run", given), ("run", short)])


def test_t5_in_two_functions(tmp_path):
    whole, _, named = NETWORKS["t5"].build()
    model = whole.model

    def encode(input_ids, attention_mask):
        return model.encoder(input_ids, attention_mask=attention_mask).last_hidden_state

    def decode(decoder_input_ids, states, attention_mask):
        out = model(
            encoder_outputs=(states,),
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
        )
        return out.logits

    mask = Tensor(("batch", "length"), "int64")
    functions = {
        "encode": (encode, {"input_ids": mask, "attention_mask": mask}),
        "decode": (
            decode,
            {
                "decoder_input_ids": Tensor(("batch", "made"), "int64"),
                "states": Tensor(("batch", "length", 64)),
                "attention_mask": mask,
            },
        ),
    }
    first = {n: named[n] for n in ("input_ids", "attention_mask")}
    with torch.no_grad():
        states = encode(**first)
    second = {
        "decoder_input_ids": named["decoder_input_ids"],
        "states": states,
        "attention_mask": named["attention_mask"],
    }
    compare(tmp_path / "artifact", model, functions, [("encode", first), ("decode", second)])


def test_whisper(tmp_path):
    whole, _, named = NETWORKS["whisper"].build()
    model = whole.model

    def encode(input_features):
        return model.model.encoder(input_features).last_hidden_state

    def decode(decoder_input_ids, states):
        return model(encoder_outputs=(states,), decoder_input_ids=decoder_input_ids).logits

    functions = {
        "encode": (encode, {"input_features": Tensor(("batch", 20, 100))}),
        "decode": (
            decode,
            {
                "decoder_input_ids": Tensor(("batch", "made"), "int64"),
                "states": Tensor(("batch", 50, 64)),
            },
        ),
    }
    first = {"input_features": named["input_features"]}
    with torch.no_grad():
        states = encode(**first)
    second = {"decoder_input_ids": named["decoder_input_ids"], "states": states}
    compare(tmp_path / "artifact", model, functions, [("encode", first), ("decode", second)])


WIDE = {"width": 2048, "heads": 32, "shared": 8, "hidden": 5632, "words": 32000}


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, id="small"),
        pytest.param({"layers": 12}, id="12 layers", marks=pytest.mark.whole),
        pytest.param(WIDE, id="wide", marks=pytest.mark.whole),
    ],
)
def test_llama_chooses_the_same_tokens(sizes, tmp_path):
    torch.manual_seed(0)
    llama = Llama(**sizes).eval()
    exported = fx2relax.export(llama, specs(llama)).lift()
    joined = [x for x in exported.lifted.lifted if "concat" in str(x)]
    assert len(joined) == len(llama.layers)  # gate and up, once for both functions
    exported.save(tmp_path / "artifact")
    artifact = fx2relax.load(tmp_path / "artifact", out="torch")
    ids = torch.randint(0, 211, (2, 9))
    eager = greedy(llama.prefill, llama.decode, ids, 64)
    ours = greedy(artifact.prefill, artifact.decode, ids, 64)
    assert all(torch.equal(a, b) for a, b in zip(eager, ours, strict=True))
