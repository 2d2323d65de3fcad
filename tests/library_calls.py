"""Calls of the library's functions, and the calls that a compiled model makes."""

import torch
import tvm
import tvm_ffi

from fx2relax import pipeline
from fx2relax.runtime import library


def function(name):
    return tvm.get_global_func(library.PREFIX + name)


def passed(*values):
    return [tvm_ffi.from_dlpack(v) if isinstance(v, torch.Tensor) else v for v in values]


def lowered(module, *inputs, monkeypatch, rtol=1e-4, atol=1e-4):
    """The lowered module of a compiled model, as text, and the compiled model."""
    texts = []
    give = pipeline.give

    def spy(mod, *args, **kwargs):
        texts.append(mod.script(show_meta=False))
        return give(mod, *args, **kwargs)

    monkeypatch.setattr(pipeline, "give", spy)
    torch._dynamo.reset()
    compiled_module = torch.compile(module, backend="relax")
    with torch.no_grad():
        torch.testing.assert_close(compiled_module(*inputs), module(*inputs), rtol=rtol, atol=atol)
    assert texts
    return "\n".join(texts), compiled_module
