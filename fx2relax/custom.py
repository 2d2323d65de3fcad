"""`custom_op`: a user's kernel as one PyTorch operator, in eager and in compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fx2relax import dtypes, registry
from fx2relax.custom_eager import Compiled
from fx2relax.custom_kernels import (
    LANGUAGES,
    Implementation,
    InObject,
    Signature,
    implementation,
)
from fx2relax.errors import Fx2RelaxError, KernelFailure, RegistrationError
from fx2relax.extern import ExternFunction
from fx2relax.rules import key_of, match, seen

__all__ = ["custom_op"]

Rule = ExternFunction | Sequence[ExternFunction] | Mapping[str, ExternFunction]
# Shapes whose match with the rule is remembered.
_REMEMBERED = 256


def custom_op(
    name: str,
    kernel: Any = None,
    *,
    language: str = "te",
    schema: str | None = None,
    rule: Rule | None = None,
    fake: Callable[..., Any] | None = None,
    gradient: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    eager: Callable[..., Any] | None = None,
) -> Any:
    """Make one PyTorch operator of a kernel.

    The operator runs in eager, under ``torch.compile(backend="relax")``, and is imported by
    `from_fx`; all of them run the same kernel, which eager compiles when it first meets tensors of
    some dtypes and ranks (and each number among the arguments).

    Args:
        name: ``"namespace::operator"``. Defining it again replaces it.
        kernel: an `extern.Kernel`; a PrimFunc, or a list of them, one a combination of dtypes; a
            function in `language`. When left out, the decorated function is the kernel; when
            given, the decorated function is looked at for its annotations alone, and with
            `schema` there is none: the operator is returned.
        language: what a function is written in. ``"te"``: takes `te.Tensor`, returns one or a
            tuple. ``"tir"``: takes the operator's arguments, tensors as `Tensor(shape, dtype)`,
            returns a PrimFunc of the inputs' buffers and then the outputs'. ``"relax"``: takes and
            returns Relax expressions. ``"torch"``: takes and returns PyTorch's tensors; compiled
            programs call it, and `from_fx` refuses it as it does all that needs PyTorch.
        schema: ``"(Tensor x, float scale=1.0, Tensor? bias=None) -> Tensor"``; read off the
            function's annotations (``x: torch.Tensor``) when left out.
        rule: what it takes and gives, in named sizes; several rules for several dtypes, or rules
            of which each has another symbol. Objects and PrimFuncs bring their own.
        fake: in the place of a rule, a function of fake tensors that returns empty ones.
        gradient: ``gradient(ctx, *grads)`` returns the gradient of each argument, None where
            there is none; see `torch.library.register_autograd`.
        setup_context: ``setup_context(ctx, inputs, output)``. Without one ``ctx.saved_tensors``
            are the arguments that are tensors, and ``ctx.numbers`` the others.
        eager: runs in eager in the place of the kernel.

    Returns:
        a `torch.library.CustomOpDef`, or a decorator that makes one. Its results are contiguous
        and share no memory with its arguments.

    Raises:
        RegistrationError: (a ValueError) neither a rule nor a fake, a rule of another number of
            arguments, an operator that writes to its arguments, an unknown language.

    The operator raises, when called: ArgumentError (a ValueError) for an argument that its rule
    does not take; KernelFailure for what the kernel raises; what `Kernels.build` raises.
    """
    if language not in LANGUAGES:
        known = ", ".join(map(repr, LANGUAGES))
        raise RegistrationError(f"{name}: language={language!r}; it takes {known}")

    def make(function: Callable[..., Any] | None) -> Any:
        used = function if kernel is None else kernel
        said = schema or torch.library.infer_schema(function, mutates_args=())  # type: ignore[arg-type]
        parsed = torch._C.parse_schema(name + said)
        module = getattr(function or kernel, "__module__", None) or __name__
        try:
            made = implementation(used, language, parsed)
            operator = _Operator(name, parsed, made, used, rule, fake, eager)
        except RegistrationError:
            raise
        except ValueError as error:
            raise RegistrationError(f"{name}: {error}") from error
        defined = torch.library.custom_op(name, operator.run, mutates_args=(), schema=said)
        operator.compiled = Compiled(operator.signature, defined._opoverload)
        defined.register_fake(operator.fake)
        if gradient is not None:
            defined.register_autograd(
                gradient, setup_context=setup_context or operator.setup_context
            )
        if made is not None:
            converter = operator.converter(made)
            converter.__module__ = str(module)
            registry.converts(defined._opoverload, override=True)(converter)
        defined.__doc__ = getattr(function, "__doc__", None)
        return defined

    if kernel is not None and schema is not None:
        return make(None)
    return make


class _Operator:
    """What PyTorch calls of one operator."""

    compiled: Compiled

    def __init__(
        self,
        name: str,
        schema: Any,
        made: Implementation | None,
        kernel: Any,
        rule: Rule | None,
        fake: Callable[..., Any] | None,
        eager: Callable[..., Any] | None,
    ) -> None:
        self.name = name
        self.signature = Signature(name, schema)
        self.made = made
        self._kernel = kernel
        self._fake = fake
        self._good: set[Any] = set()
        self._eager = eager
        self.rules = _rules(made, rule)
        if self.rules is None and fake is None:
            raise RegistrationError(f"{name} needs rule= or fake=, which tell its result's shape")
        returns = [str(r.type) for r in schema.returns]
        if set(returns) != {"Tensor"} or schema.is_mutable:
            raise RegistrationError(f"{name} has to return new tensors: {schema}")
        for known in self.rules or ():
            if len(known.args) != len(schema.arguments) or len(known.results) != len(returns):
                raise RegistrationError(
                    f"{name} takes {len(schema.arguments)} arguments and returns {len(returns)}, "
                    f"its rule {len(known.args)} and {len(known.results)}: {schema}"
                )
        self._single = len(returns) == 1

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Eager's implementation."""
        values = self.signature.bind(args, kwargs)
        key = key_of(values) if self.rules is not None else None
        if key is not None and key not in self._good:
            self._match(values)
            if len(self._good) >= _REMEMBERED:
                self._good.clear()
            self._good.add(key)
        try:
            results = self._run(args, kwargs, values)
            tensors = [results] if isinstance(results, torch.Tensor) else list(results)
            tensors = [t.contiguous() for t in tensors]
        except Fx2RelaxError:
            raise
        except Exception as error:
            raise KernelFailure.of([self.name], error) from error
        return tensors[0] if self._single else tuple(tensors)

    def _run(self, args: Any, kwargs: Any, values: list[Any]) -> Any:
        if self._eager is not None:
            return self._eager(*args, **kwargs)
        if self.made is None:
            return self._kernel(*args, **kwargs)
        if isinstance(self.made, InObject):
            return self.made.kernel.run(values, self.name, self.signature.names)
        return self.compiled(values)

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """Empty tensors of the shapes that it returns."""
        values = self.signature.bind(args, kwargs)
        found = self._match(values)
        if self._fake is not None:
            given = self._fake(*args, **kwargs)
            tensors = [given] if isinstance(given, torch.Tensor) else list(given)
            made = [t if t.is_contiguous() else t.new_empty(t.shape) for t in tensors]
        else:
            assert found is not None
            device = next((v.device for v in values if isinstance(v, torch.Tensor)), None)
            made = [
                torch.empty(r.shape, dtype=dtypes.to_torch(r.dtype), device=device)
                for r in found.results()
            ]
        return made[0] if self._single else tuple(made)

    def _match(self, values: list[Any]) -> Any:
        if self.rules is None:
            return None
        return match(self.rules, [seen(v) for v in values], self.name, self.signature.names)

    def setup_context(self, ctx: Any, inputs: Any, output: Any) -> None:
        """Save what a gradient may need."""
        ctx.save_for_backward(*(v for v in inputs if isinstance(v, torch.Tensor)))
        ctx.numbers = tuple(v for v in inputs if not isinstance(v, torch.Tensor))

    def converter(self, made: Implementation) -> Callable[..., Any]:
        """The converter of its overload."""

        def convert(*args: Any, **kwargs: Any) -> Any:
            values = self.signature.bind(args, kwargs)
            self.signature.known(values)
            return made.convert(self.signature, values)

        convert.__signature__ = self.signature.python  # type: ignore[attr-defined]
        convert.__name__ = convert.__qualname__ = self.name.replace("::", "_")
        return convert


def _rules(made: Implementation | None, rule: Rule | None) -> list[ExternFunction] | None:
    if rule is not None:
        if isinstance(rule, ExternFunction):
            return [rule]
        return list(rule.values() if isinstance(rule, Mapping) else rule)
    own = made.rules if made is not None else None
    return list(own) if own is not None else None
