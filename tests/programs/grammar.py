"""The lines that a random program is made of: families of forms, and what they do to exactness.

Values that rounding has touched never decide anything: comparisons, rounding, sorting and casts to
integers take exact operands, so that a last digit cannot turn into another answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Family:
    """Lines of one sort.

    Attributes:
        weight: how often the family is taken.
        forms: texts separated by semicolons. X, Y, M and I stand for variables, AXIS and OTHER for
            axes of X, KEEP for ``, keepdim=True`` or nothing.
        X, Y, M, I: what may stand there: ``"float"``, ``"int"``, ``"bool"``, ``"number"`` or
            ``"any"``; with ``"exact"``, what rounding has not touched; with ``"like"``, of the
            shape of X.
        exact: whether floats that are exact give floats that are.
        least: how many axes X has at least.
        writes: whether the lines change X and make no variable.
    """

    weight: int
    forms: str
    X: str = "any"
    Y: str = "any"
    M: str = "bool"
    I: str = "int exact"  # noqa: E741
    exact: bool = False
    least: int = 0
    writes: bool = False

    def texts(self) -> list[str]:
        """The forms one by one."""
        return [" ".join(form.split()) for form in self.forms.split(";")]


FAMILIES = (
    Family(8, X="float", forms="""
        X.sin(); X.cos(); X.tanh(); torch.sigmoid(X); X.clamp(max=3).exp(); X.abs().log1p();
        (X.abs() + 0.5).sqrt(); (X * X + 1).rsqrt(); F.gelu(X); F.silu(X); X.erf(); F.softplus(X);
        (X.square() + 1).reciprocal(); X.clamp(max=2).expm1(); X.atan(); F.elu(X);
        F.leaky_relu(X, 0.1); F.hardswish(X); F.logsigmoid(X); F.mish(X); X.asinh();
        (X.abs() + 1).log(); F.gelu(X, approximate='tanh'); X.sinc(); F.tanhshrink(X);
        torch.logit(X.tanh() * 0.4 + 0.5); F.hardtanh(X, -1, 2); F.softsign(X); X.erfc()"""),
    Family(4, X="number", exact=True, forms="""
        -X; X.abs(); X.relu(); X.clone(); X.contiguous(); X.clamp(-2, 2); X * 1; X.nan_to_num()"""),
    Family(3, X="float exact", exact=True, forms="""
        X.floor(); X.ceil(); X.round(); X.trunc(); X.sign(); X.frac(); X.remainder(2); X // 2"""),
    Family(4, X="int", exact=True, forms="""
        X // 3; X % 4; X & 6; X | 1; X ^ 5; ~X; X.clamp(-3, 5); X.abs() >> 1; X // -2; X % -3;
        X.abs().clamp(max=9) << 2; torch.div(X, 2, rounding_mode='trunc'); X.remainder(-5);
        torch.fmod(X, 3); X.bitwise_and(3); X.sign(); X.square().clamp(max=50)"""),
    Family(4, X="number", forms="""
        X + 2; X * 0.5; 3 - X; X / 4; X - 0.25; X * 3; 1.5 + X; X ** 2; X.float() ** 3"""),
    Family(8, X="number", forms="""
        X + Y; X - Y.float(); X * Y; X / (Y.abs() + 1.5); torch.add(X, Y, alpha=2);
        torch.atan2(X.float(), Y.float() + 7); torch.lerp(X.float(), Y.float(), 0.3);
        torch.addcmul(X.float(), Y.float(), Y.float(), value=0.5); X.double() - Y;
        torch.hypot(X.float(), Y.float()); torch.logaddexp(X.float(), Y.float())"""),
    Family(4, X="number", Y="number", exact=True, forms="""
        torch.maximum(X, Y); torch.minimum(X, Y); torch.fmax(X, Y); X.clamp(max=Y)"""),
    Family(4, X="any exact", Y="any exact", exact=True, forms="""
        X > Y; X <= Y; X == Y; X != 0; X.isnan(); X.bool() & Y.bool(); X.logical_or(Y);
        X.logical_xor(Y); X.signbit(); torch.isclose(X, X); X.logical_not(); X.ne(Y)"""),
    Family(4, exact=True, forms="""
        torch.where(M, X, Y); torch.where(M, X, 0); X.masked_fill(M, 2); torch.where(M, 1.0, X)"""),
    Family(7, X="number", least=1, forms="""
        X.sum(); X.sum(AXIS KEEP); X.float().mean(AXIS KEEP); X.double().mean(); X.sum((0, -1));
        X.float().var(AXIS KEEP); X.float().std(); X.float().norm(dim=AXIS KEEP); X.cumsum(AXIS);
        X.float().logsumexp(AXIS KEEP); X.float().softmax(AXIS); X.float().log_softmax(AXIS);
        (X.float() / 8).prod(AXIS KEEP); (X.float() / 8).cumprod(AXIS);
        X.float().logcumsumexp(AXIS); F.layer_norm(X.float(), [X.size(-1)]);
        F.normalize(X.float(), dim=AXIS); X.float().var(AXIS, correction=0 KEEP)"""),
    Family(4, X="number exact", least=1, exact=True, forms="""
        X.amax(AXIS); X.amin(AXIS, keepdim=True); X.max(); X.max(AXIS).values;
        X.sort(AXIS).values; X.sort(AXIS, stable=True).indices; X.argmax(AXIS); X.argmin(AXIS);
        X.argsort(AXIS, descending=True, stable=True); X.topk(1, AXIS).values;
        X.median(AXIS).values; X.cummax(AXIS).values; X.kthvalue(1, AXIS).values;
        X.count_nonzero(AXIS); (X > 0).any(AXIS); (X > -2).all(AXIS); X.bool().sum(AXIS);
        X.aminmax().max; X.diff(dim=AXIS); X.cummin(AXIS).indices; X.min(AXIS).indices"""),
    Family(10, least=1, exact=True, forms="""
        X.transpose(AXIS, OTHER); X.reshape(-1); X.unsqueeze(AXIS); X.squeeze();
        X.narrow(AXIS, 1, 1); X[1:]; X[..., ::2]; X[..., :-1]; X.select(AXIS, 0); X[-1];
        X.movedim(AXIS, OTHER); X.flip(AXIS); X.chunk(2, AXIS)[-1]; X.split(2, AXIS)[0];
        X.unbind(AXIS)[0]; X.expand(2, *X.shape); X.mT; X.flatten(0, 1);
        X.reshape(X.size(-1), -1); X.view(X.shape); X.diagonal(); X.roll(1, AXIS);
        X.repeat(2, *[1] * (X.dim() - 1)); X.unfold(AXIS, 2, 1); X[None, ..., 0];
        X.permute(tuple(reversed(range(X.dim())))); X.swapaxes(0, AXIS); X.detach(); X.tril();
        F.pad(X, (1, 0)); X.repeat_interleave(2, dim=AXIS); X.view_as(X); X[0:0]; X.t();
        X.unflatten(AXIS, (-1, 1)); X.rot90(); X.triu(1); X.squeeze(AXIS); X.real"""),
    Family(8, X="number", writes=True, forms="""
        X.add_(1); X.mul_(2); X.add_(Y); X.sub_(Y); X[..., 0] += 2; X[:1].mul_(-1); X.t().add_(1);
        torch.add(X, 1, out=X); X.unsqueeze(0).sub_(2); X.diagonal().add_(1); X += Y; X *= 0.5;
        X.index_add_(0, torch.tensor([0, 0]), X[:2]); X.addcmul_(X, X, value=0.1)"""),
    Family(5, X="number", writes=True, exact=True, forms="""
        X.copy_(Y); X.fill_(3); X.zero_(); X.clamp_(-1, 1); X.neg_(); X[0] = 1; X[1:] = Y;
        X.relu_(); X.transpose(0, -1)[0].fill_(4); X.select(-1, 0).copy_(Y); X.squeeze_();
        X.view(-1)[1:].fill_(7); X.index_fill_(0, torch.tensor([0, -1]), 5); X.t_(); X.abs_();
        X.unsqueeze_(0); X.resize_as_(X); X.transpose_(0, -1); X[torch.tensor([1, 0])] = 2;
        X.index_copy_(0, torch.tensor([1]), X[:1]); X.masked_fill_(M, 1); X.tril_(); X[M] = 0"""),
    Family(6, least=1, exact=True, forms="""
        X[torch.tensor([0, 1, 0])]; X.index_select(AXIS, torch.tensor([1, 0, 1])); X[[0, -1]];
        X.gather(AXIS, torch.zeros_like(X, dtype=torch.int64)); X[I.long() % X.size(0)];
        X.take_along_dim(torch.zeros_like(X, dtype=torch.long), AXIS);
        X.index_select(AXIS, (I.long() % X.size(AXIS)).flatten()); X.take(I.long() % X.numel());
        X[..., torch.tensor([True])]; X[torch.arange(X.size(0)) % 2]; F.one_hot(I.long() % 5, 5);
        F.embedding(I.long() % X.size(0), X); X[:, torch.tensor([0, 1])]; X[torch.tensor([-1])]"""),
    Family(3, X="number", least=1, forms="""
        X.float().scatter_add(AXIS, torch.zeros_like(X, dtype=torch.int64), X.float());
        X.index_add(AXIS, torch.arange(X.size(AXIS)), X); X.cov();
        X.index_put((torch.tensor([0, 0]),), X[:1], True);
        X.float().scatter_reduce(AXIS, torch.zeros_like(X).long(), X.float(), 'mean')"""),
    Family(4, Y="any like", least=1, exact=True, forms="""
        torch.cat([X, Y], AXIS); torch.stack([X, Y], AXIS); torch.cat([X[:1], Y]);
        torch.hstack([X, Y]); torch.cat([X, Y, X], AXIS)"""),
    Family(4, X="float", Y="float like", least=1, forms="""
        X @ Y.mT; X.flatten(1) @ Y.flatten(1).t(); torch.einsum('...i,...j->...ij', X, Y);
        F.linear(X, Y.reshape(-1, X.size(-1))); torch.outer(X.flatten(), Y.flatten()[:3]);
        X.mT @ Y.to(X.dtype); torch.dot(X.flatten(), Y.flatten()); torch.linalg.vector_norm(X - Y);
        torch.cdist(X.flatten(1), Y.flatten(1)); torch.baddbmm(X, X @ X.mT, Y);
        F.scaled_dot_product_attention(X, Y, X); F.mse_loss(X, Y); F.cosine_similarity(X, Y)"""),
    Family(3, exact=True, forms="""
        X.double(); X.to(torch.float64); X.type(torch.float64); X.float()"""),
    Family(3, X="any exact", exact=True, forms="""
        X.long(); X.int(); X.bool(); X.to(torch.int16); X.to(torch.int8); X.to(torch.bfloat16);
        X.to(torch.float16); X.clamp(0, 9).to(torch.uint8)"""),
    Family(3, least=1, exact=True, forms="""
        torch.arange(X.size(0)); torch.zeros_like(X); torch.full_like(X, 3); torch.ones(X.shape);
        X.new_zeros(X.size(-1)); torch.eye(X.size(0)); torch.tensor([1.5, 2.0]);
        torch.arange(X.size(-1), dtype=torch.float32) / 4; torch.empty_like(X).fill_(2);
        torch.ones_like(X, dtype=torch.bool).tril(); torch.linspace(0, 1, 5)"""),
)  # fmt: skip


@dataclass
class Line:
    """A line of a program.

    Attributes:
        text: the statement.
        reads: variables whose values end up in the result.
        exact: whether exact floats stay exact.
        writes: the variable that an in-place line changes.
    """

    text: str
    reads: list[str]
    exact: bool
    writes: str | None = None


_PLACES = re.compile(r"\b(X|Y|M|I|AXIS|OTHER)\b| ?\bKEEP\b")


def line(
    rng: random.Random,
    tensors: Mapping[str, torch.Tensor],
    exact: Mapping[str, bool],
    fresh: str,
) -> Line | None:
    """A random line over the variables so far; None where none of them fits."""
    family = rng.choices(FAMILIES, [f.weight for f in FAMILIES])[0]
    form = rng.choice(family.texts())
    chosen: dict[str, str] = {}
    for place in ("X", "Y", "M", "I"):
        if re.search(rf"\b{place}\b", form):
            like = tensors[chosen["X"]] if "X" in chosen else None
            least = family.least if place == "X" else 0
            wanted = getattr(family, place)
            names = [n for n, t in tensors.items() if _fits(t, wanted, exact[n], least, like)]
            if not names:
                return None
            # Late variables come out more often, so that programs grow deep.
            chosen[place] = rng.choice(names + names[-4:] * 2)
    rank = max(tensors[chosen["X"]].dim(), 1) if "X" in chosen else 1
    keep = rng.choice(("", ", keepdim=True"))

    def filled(match: re.Match[str]) -> str:
        place = match.group(0).strip()
        if place in ("AXIS", "OTHER"):
            return chosen.setdefault(place, str(rng.randrange(-rank, rank)))
        return keep if place == "KEEP" else chosen[place]

    text = _PLACES.sub(filled, form)
    reads = [chosen[p] for p in ("X", "Y") if p in chosen]
    if family.writes:
        return Line(text, reads, family.exact, chosen["X"])
    return Line(f"{fresh} = {text}", reads, family.exact)


def _fits(
    tensor: torch.Tensor, wanted: str, exact: bool, least: int, like: torch.Tensor | None
) -> bool:
    floating, boolean = tensor.is_floating_point(), tensor.dtype is torch.bool
    kind, *rest = wanted.split()
    of_kind = {
        "any": True,
        "float": floating,
        "bool": boolean,
        "int": not floating and not boolean,
        "number": not boolean,
    }[kind]
    shaped = "like" not in rest or like is None or tensor.shape == like.shape
    return of_kind and shaped and tensor.dim() >= least and (exact or "exact" not in rest)
