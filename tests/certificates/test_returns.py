"""`certify` returns what `verify` accepts, and raises nothing but its own error, whatever the model or torch raises."""

import logging
import threading
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellnormed.certificates import UncertifiableError, certify, verify
from wellnormed.lowering.ledger import Ledger
from wellnormed.program import operation
from wellnormed.proof import CheckError

from .adversary import Net


def _heads() -> dict[str, nn.Module]:
    return {name: nn.Linear(4, 4) for name in "qkv"}


def _filled(layer: nn.Module, value: float, name: str = "weight") -> nn.Module:
    nn.init.constant_(getattr(layer, name), value)
    return layer


def _one_key(s: Any, x: Tensor) -> Tensor:
    logits = s.q(x) @ s.k(x[:, :1]).mT + torch.zeros(5, 7)  # the mask makes one key seven
    return torch.softmax(logits, -1) @ s.v(x[:, :1]).expand(1, 7, 4)


def _spelled(s: Any, x: Tensor) -> Tensor:
    return torch.softmax(s.q(x) @ s.k(x).mT, -1) @ s.v(x)


def _fused(s: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(s.q(x), s.k(x), s.v(x))


class _FrozenDict(OrderedDict):
    """As in diffusers: whatever would change it is an error, and what it holds are attributes as well."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.frozen = True

    def __setitem__(self, key: str, value: Any) -> None:
        if hasattr(self, "frozen"):
            raise TypeError("this dictionary is frozen")
        super().__setitem__(key, value)

    def update(self, *_: Any, **keywords: Any) -> None:
        raise TypeError("this dictionary is frozen")

    clear = pop = setdefault = __delitem__ = update  # type: ignore[assignment]


def _scaled(held: Any) -> nn.Module:
    return Net(lambda s, x: s.layer(x) * s.held["scale"], layer=nn.Linear(4, 4), held=held)


CERTIFIED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "one key, seven by a mask": (lambda: Net(_one_key, **_heads()), torch.rand(1, 5, 4)),
    "queries of two axes": (lambda: Net(_spelled, **_heads()), torch.rand(5, 4)),
    "queries of two axes, fused": (lambda: Net(_fused, **_heads()), torch.rand(5, 4)),
    "kernel of 3e38": (lambda: _filled(nn.Conv2d(1, 1, 3), 3e38), torch.zeros(1, 1, 5, 5)),
    "least number": (lambda: _filled(nn.Linear(4, 4).double(), 5e-324), torch.zeros(2, 4).double()),
    "complex input that is not used": (
        lambda: Net(lambda s, x, z: 2 * x),
        (torch.rand(1, 3), torch.rand(1, 3, dtype=torch.complex64)),
    ),
    "float8 tensor that is not used": (
        lambda: Net(lambda s, x: 2 * x, w=torch.zeros(3).to(torch.float8_e4m3fn)),
        torch.rand(1, 3),
    ),
    "frozen dictionary": (lambda: _scaled(_FrozenDict({"scale": 2.0})), torch.rand(1, 4)),
    "dictionary with a default": (lambda: _scaled(defaultdict(float, scale=2.0)), torch.rand(1, 4)),
    "counter": (lambda: _scaled(Counter(scale=2)), torch.rand(1, 4)),
    "proxy of a dictionary": (lambda: _scaled(types.MappingProxyType({"scale": 2.0})), torch.rand(1, 4)),
    "lock": (lambda: Net(lambda s, x: s.layer(x), layer=nn.Linear(4, 4), lock=threading.Lock()), torch.rand(1, 4)),
}


@pytest.mark.parametrize("name", CERTIFIED)
def test_verify_accepts_what_certify_returns(name: str) -> None:
    torch.manual_seed(0)
    build, example = CERTIFIED[name]
    model = build().eval()
    certificate = certify(model, example)
    assert verify(certificate, model.state_dict()).lipschitz == certificate.lipschitz.exact


def _cast(s: Any, x: Tensor) -> Tensor:
    s.layer.double()
    y = s.layer(x.double()).to(x.dtype)
    s.layer.float()
    return y


def _set(s: Any, x: Tensor) -> Tensor:
    s.w.set_(s.w / s.w.norm())
    return x * s.w


def _graph(s: Any, x: Tensor, edges: Tensor) -> Tensor:
    sums = torch.zeros(int(edges.max()) + 1, x.shape[1])
    return sums.index_add(0, edges[1], x[edges[0]])


def _raise(error: Exception) -> Any:
    raise error


_LARGE = {"dtype": torch.float64}

REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    # what has no bound
    "no bound": (
        lambda: nn.Sequential(nn.Linear(4, 4), Net(lambda s, x: torch.softmax(x.lgamma(), -1))),
        torch.ones(2, 4),
        r"operation `lgamma.default` in module `1` at .*:\d+ `return self.function\(self, x, ",
    ),
    "not continuous": (lambda: Net(lambda s, x: x.round()), torch.ones(2, 4), "not continuous"),
    "dropout in training": (lambda: nn.Dropout(0.1), torch.ones(2, 4), "dropout is active in training mode"),
    "batch norm in training": (lambda: nn.BatchNorm1d(4), torch.ones(2, 4), r"eval\(\)"),
    "weight of nan": (lambda: _filled(nn.Linear(4, 4), torch.nan), torch.ones(2, 4), "entries that are not finite"),
    # what a certificate cannot speak of
    "empty batch": (lambda: nn.Linear(3, 2), torch.zeros(0, 3), "input `input`: its result has no entries"),
    "output of size 0": (lambda: Net(lambda s, x: x[:, :0]), torch.zeros(1, 3), "output: its result has no entries"),
    "complex second input": (
        lambda: Net(lambda s, x, z: x * z.abs()),
        (torch.rand(1, 3), torch.rand(1, 3, dtype=torch.complex64)),
        "is of torch.complex64, which no certificate holds; make it",
    ),
    "complex factor": (lambda: Net(lambda s, x: x * 1j), torch.rand(1, 3), "complex64; compute with real and imag"),
    "float8 weight": (
        lambda: Net(lambda s, x: x * s.w.float(), w=torch.ones(3).to(torch.float8_e5m2)),
        torch.rand(1, 3),
        "tensor `w`: w is of torch.float8_e5m2, which no certificate holds",
    ),
    "float8 input": (
        lambda: Net(lambda s, x: x.float()),
        torch.rand(1, 3).to(torch.float8_e5m2),
        "the input is of torch.float8_e5m2; pass one of float64",
    ),
    "sparse weight": (
        lambda: Net(lambda s, x: torch.sparse.mm(s.w, x), w=torch.eye(3).to_sparse()),
        torch.rand(3, 3),
        "the tensor w of the model is .* of the layout torch.sparse_coo; make it dense",
    ),
    "sparse input": (nn.Identity, torch.eye(3).to_sparse(), "example_input is .* torch.sparse_coo; make it dense"),
    "meta weights": (lambda: nn.Linear(3, 2, device="meta"), torch.rand(1, 3), "has no values, as on the device meta"),
    "meta input": (lambda: nn.Linear(3, 2), torch.rand(1, 3, device="meta"), "example_input has no values"),
    "lazy weights": (
        lambda: nn.Sequential(nn.LazyLinear(2)),
        torch.rand(1, 3),
        "the tensor 0.weight of the model is not initialised; run",
    ),
    # numbers that no float holds
    "gain of 1.7e308": (lambda: _filled(nn.LayerNorm(4, **_LARGE), 1.7e308), torch.rand(1, 4).double(), "2\\^1000"),
    "table of 1.7e308": (lambda: _filled(nn.Embedding(4, 4, **_LARGE), 1.7e308), torch.tensor([[1]]), "2\\^1000"),
    "products of factors": (
        lambda: Net(lambda s, x: x * 1e200 * 1e200),
        torch.zeros(1, 4).double(),
        "the product of its factors leaves",
    ),
    # what is not recorded
    "queries of one axis": (
        lambda: Net(lambda s, x: torch.softmax(s.q(x)[0] @ s.k(x).mT, -1) @ s.v(x), **_heads()),
        torch.rand(5, 4),
        "its queries, keys or values are a single vector; give them an axis of tokens",
    ),
    "flags of the input as an index": (lambda: Net(lambda s, x: x[x > 0]), torch.rand(1, 3), "it is not continuous"),
    "cast while it runs": (lambda: Net(_cast, layer=nn.Linear(4, 4)), torch.rand(1, 4), "runs on the example, but c"),
    "set_": (lambda: Net(_set, w=torch.rand(4)), torch.rand(1, 4), "Encountered a set_ on a graph input.*nothing may"),
    "values read": (lambda: Net(lambda s, x: x * float(x.max())), torch.rand(1, 3), "Control flow may not depend"),
    "graph network": (
        lambda: Net(_graph),
        (torch.rand(4, 3), torch.tensor([[0, 1, 2], [1, 2, 3]])),
        "runs on the example, but cannot be captured at .*test_returns.py:.*Control flow may not depend on values",
    ),
    # what the model itself says of the example
    "wrong shape": (lambda: nn.Linear(3, 2), torch.rand(1, 4), r"Linear itself fails .*RuntimeError: mat1 and"),
    "wrong dtype": (lambda: nn.Linear(3, 2), torch.rand(1, 3).double(), "itself fails .* must have the same dtype"),
    "token beyond the table": (lambda: nn.Embedding(3, 2), torch.tensor([[5]]), "itself fails .*IndexError: index out"),
    "keys of one axis": (lambda: Net(_fused, **_heads()), torch.rand(4), "itself fails .*at least 2 dimensional"),
    "no argument": (lambda: nn.Linear(3, 2), (), "itself fails on the example: TypeError: .*missing 1 required"),
    "no tensor": (lambda: nn.Linear(3, 2), "text", "itself fails on the example: TypeError: .*must be Tensor, not str"),
    "its own error": (
        lambda: Net(lambda s, x: _raise(KeyError("my own trouble"))),
        torch.rand(1, 3),
        r"Net itself fails on the example at .*test_returns.py:\d+: KeyError: 'my own trouble'; .*pass an example",
    ),
    "several results": (lambda: nn.LSTM(3, 4), torch.rand(2, 1, 3), "of 0 .Tensor., 1 .tuple.; pass output=0"),
}


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, which are equal where it holds NaN."""
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", REFUSED)
def test_certify_raises_its_own_error_alone(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    build, example, message = REFUSED[name]
    model = build()
    before = {key: value.clone() for key, value in model.state_dict().items() if value.device.type == "cpu" and
              type(value) is Tensor and value.layout is torch.strided}  # fmt: skip
    with pytest.raises(UncertifiableError, match=f"(?s){message}") as caught:
        certify(model, example)
    assert "FakeTensor" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    after = model.state_dict()
    assert all(torch.equal(bits(value), bits(after[key])) for key, value in before.items())


def test_nothing_is_printed_where_a_batch_of_any_size_cannot_be_captured(capfd: pytest.CaptureFixture[str]) -> None:
    """torch writes a traceback of every operation that fails for a size that it tries."""
    edges = torch.tensor([[0, 1, 2], [1, 2, 3]])

    def messages(s: Any, x: Tensor) -> Tensor:
        return torch.eye(4)[:, edges[1]] @ s.layer(x[edges[0]])

    model = Net(messages, layer=nn.Linear(3, 3))
    assert not certify(model, torch.rand(4, 3)).each_sample
    assert capfd.readouterr() == ("", "")


def test_logging_works_as_before(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UncertifiableError):
        certify(Net(lambda s, x: _raise(KeyError())), torch.rand(1, 3))
    logging.getLogger("model").error("still heard")
    assert "still heard" in caplog.text


def test_what_stops_a_program_is_not_turned_into_a_refusal() -> None:
    with pytest.raises(KeyboardInterrupt):
        certify(Net(lambda s, x: _raise(KeyboardInterrupt())), torch.rand(1, 3))  # type: ignore[arg-type]


def test_what_the_proof_refuses_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Ledger.prove

    def lowered(ledger: Ledger, *arguments: Any, **settings: Any) -> Any:
        claim = honest(ledger, *arguments, **settings)
        return replace(claim, values=tuple(0.99 * each for each in claim.values))

    monkeypatch.setattr(Ledger, "prove", lowered)
    with pytest.raises(UncertifiableError, match=r"operation `linear.default` .*: spectral of weight .*not be proved"):
        certify(nn.Linear(4, 4), torch.rand(1, 4))


def record(name: str, lowering: Any) -> operation.Operation:
    return operation.Operation(name, "function", lowering)


def test_a_primitive_that_the_proof_does_not_know_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        operation.OPERATIONS,
        "aten.relu.default",
        record("aten.relu.default", lambda ledger, x: ledger.derive("unheard", [(x, (1,))], shape=x.shape)),
    )
    with pytest.raises(UncertifiableError, match="nothing is known of 'unheard'"):
        certify(nn.ReLU(), torch.rand(1, 4))


class _Unreadable:
    def __array__(self, *_: Any, **keywords: Any) -> Any:
        raise KeyError("no array")


NOT_VERIFIED: dict[str, tuple[Any, Any, str]] = {
    "no certificate": (3, {}, "not proved: .*not int"),
    "a missing file": ("nowhere.json", {}, "not proved: .*No such file"),
    "no name of a file": ("a\0b", {}, "not proved: embedded null byte"),
    "no weights": (None, None, "weights must be a path or state dict, got NoneType; pass model"),
    "no name of weights": (None, "a\0b", "cannot be read: embedded null byte"),
    "sparse weights": (None, {"weight": torch.eye(3).to_sparse()}, "not proved: weight cannot be read: unsupported"),
    "meta weights": (None, {"weight": torch.zeros(3, 3, device="meta")}, "weight cannot be read: .*meta tensor"),
    "complex weights": (None, {"weight": torch.zeros(3, 3) * 1j}, "weight cannot be read: dtype complex64 is not one"),
    "foreign weights": (None, {"weight": _Unreadable()}, "weight cannot be read: 'no array'"),
}


@pytest.mark.parametrize("name", NOT_VERIFIED)
def test_verify_raises_its_own_error_alone(name: str) -> None:
    certificate, weights, message = NOT_VERIFIED[name]
    if certificate is None:
        certificate = certify(nn.Linear(3, 3, bias=False), torch.rand(1, 3))
    with pytest.raises(CheckError, match=message):
        verify(certificate, weights)
