"""Trees written down and read back; what is refused; skeletons that somebody has tampered with."""

import contextlib
import itertools
import json
import math
import struct
from collections import Counter, OrderedDict

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from tests.support import SOAK
from torchelastic.errors import TransferError
from torchelastic.tensors import tensor_tree


def roundtrip(tree):
    return tensor_tree.restore(*tensor_tree.flatten(tree))


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
)
TREES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])) | st.integers(), inner)
    ),
    max_leaves=20,
)


@given(TREES)
@settings(max_examples=20 * SOAK)
def test_plain_values_come_back_as_they_were(tree):
    assert repr(roundtrip(tree)) == repr(tree)


def test_a_nan_keeps_its_bits():
    odd = struct.unpack(">d", bytes.fromhex("7ff8000000000abc"))[0]
    assert struct.pack(">d", roundtrip([odd])[0]).hex() == "7ff8000000000abc"
    assert roundtrip(-math.inf) == -math.inf


DTYPES = (
    "float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 complex64 bool uint8 int64 uint16"
)


def test_tensors_come_back_as_they_were():
    for name, shape in itertools.product(DTYPES.split(), [(), (0,), (3,), (2, 0, 3), (2, 3)]):
        dtype = getattr(torch, name)
        tensor = torch.randint(0, 2, shape).to(dtype)
        back = roundtrip({"x": [tensor]})["x"][0]
        assert (back.dtype, back.shape, back.stride()) == (dtype, tensor.shape, tensor.stride())
        assert back.tolist() == tensor.tolist(), (name, shape)


def test_the_order_of_elements_in_memory_is_kept():
    for what, tensor, dense in (
        ("plain", torch.rand(4, 6), True),
        ("transposed", torch.rand(4, 6).t(), True),
        ("channels last", torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        ("last, 1x1", torch.rand(2, 3, 1, 1).to(memory_format=torch.channels_last), True),
        ("every other", torch.rand(8, 6)[::2], False),
        ("expanded", torch.rand(1, 6).expand(4, 6), False),
    ):
        skeleton, (same,) = tensor_tree.flatten([tensor])
        (spec,) = tensor_tree.specs(skeleton)
        assert same.data_ptr() == tensor.data_ptr(), what
        assert spec.shape == tensor.shape, what
        assert spec.describes(tensor) == dense, what
        assert spec.empty().stride() == (tensor if dense else tensor.contiguous()).stride(), what
        assert spec.describes(spec.empty()), what


def test_a_spec_describes_only_what_takes_its_bytes():
    (spec,) = tensor_tree.specs(tensor_tree.flatten(torch.zeros(2, 3))[0])
    assert spec.describes(torch.ones(2, 3))
    assert not spec.describes(torch.ones(3, 2))
    assert not spec.describes(torch.ones(3, 2).t())
    assert not spec.describes(torch.ones(2, 3, dtype=torch.float64))


def test_complex_views_are_written_as_what_they_show():
    conjugate = torch.tensor([1 + 2j]).conj()
    assert roundtrip(conjugate).tolist() == [1 - 2j]
    assert not tensor_tree.flatten(conjugate)[1][0].is_conj()


def test_one_tensor_in_two_places_is_sent_once_and_stays_one():
    tied = torch.rand(3)
    skeleton, tensors = tensor_tree.flatten({"a": tied, "b": [tied], "c": tied[:2]})
    assert len(tensors) == 2
    back = tensor_tree.restore(skeleton, tensors)
    assert back["a"] is back["b"][0]


def test_empty_tensors_are_not_taken_for_one_another():
    back = roundtrip([torch.empty(0), torch.empty(0, 2), torch.empty(0, dtype=torch.int64)])
    assert [(x.dtype, tuple(x.shape)) for x in back] == [
        (torch.float32, (0,)),
        (torch.float32, (0, 2)),
        (torch.int64, (0,)),
    ]


def test_arrays_come_back_as_arrays():
    for array in (
        numpy.arange(6.0).reshape(2, 3),
        numpy.arange(6.0).reshape(2, 3).T,
        numpy.array(3, dtype=numpy.int16),
        numpy.array([], dtype=numpy.complex128),
        numpy.array([True, False]),
        numpy.arange(3, dtype=">f4"),
        numpy.float64(0.5),
        numpy.uint8(7),
    ):
        back = roundtrip((array,))[0]
        assert type(back) is type(array), repr(array)
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        assert back.tolist() == array.tolist()


def test_an_array_that_must_not_be_written_is_copied():
    array = numpy.arange(3)
    array.setflags(write=False)
    back = roundtrip(array)
    back[0] = 9
    assert array[0] == 0


def test_generators_states_are_parts():
    state = numpy.random.default_rng(0).bit_generator.state  # has ints of 128 bits
    assert roundtrip(state) == state
    assert roundtrip(1 << 20000) == 1 << 20000
    assert roundtrip(-1 << 64) == -1 << 64


def test_dicts_keep_their_type_and_a_module_its_versions():
    state = torch.nn.BatchNorm1d(2).state_dict()
    back = roundtrip(state)
    assert type(back) is OrderedDict
    assert back._metadata == state._metadata
    assert roundtrip(Counter({30: 1})) == Counter({30: 1})
    assert type(roundtrip(Counter())) is Counter


def stepped(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


SCHEDULERS = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "LambdaLR of a function": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.5),
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, Warmup()),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=9),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, scale_fn=lambda x: x),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.LinearLR(o)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o)]),
}


class Warmup:
    """A learning rate as an object: what it has is part of the scheduler's state."""

    def __init__(self):
        self.steps = 10

    def __call__(self, step):
        return step / self.steps


def test_schedulers_are_parts():
    for name, make in SCHEDULERS.items():
        parameters = torch.nn.Linear(2, 2).parameters()
        scheduler = make(stepped(torch.optim.SGD(parameters, lr=0.1, momentum=0.9)))
        tensor_tree.check(name, scheduler)
        scheduler.load_state_dict(roundtrip(scheduler.state_dict()))


def with_a_function_in_its_state():
    warmup = Warmup()
    warmup.curve = lambda step: step
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    return lr_scheduler.LambdaLR(optimizer, warmup)


ENDLESS = []
ENDLESS.append(ENDLESS)


class Odd(int):
    pass


def test_invalid_value_is_refused_by_its_path():
    for value, message in (
        ({"a": [object()]}, r"part\['a'\]\[0\] is of type builtins.object"),
        (len, "part is a function"),
        (b"bytes", "part is of type builtins.bytes"),
        ({1, 2}, "part is of type builtins.set"),
        (Odd(3), r"part is of type .*\.Odd"),
        ({(1, 2): 3}, r"part has the key \(1, 2\); keys are str or int"),
        ({True: 3}, "part has the key True"),
        (torch.zeros(2, device="meta"), "part is a tensor on meta"),
        (torch.eye(2).to_sparse(), "part is a sparse or nested tensor"),
        (numpy.array(["text"]), "part is a numpy array of <U4; use a numeric dtype"),
        (numpy.array([object()]), "part is a numpy array of object; use a numeric dtype"),
        (Warmup, r"part is of type builtins\.type"),
        (torch.nn.Linear, r"part is of type builtins\.type"),
        (with_a_function_in_its_state(), r"part\['lr_lambdas'\]\[0\]\['curve'\] is a function"),
        (ENDLESS, ".*does it contain itself"),
    ):
        with pytest.raises(TypeError, match=f"^{message}"):
            tensor_tree.check("part", value)


# --- skeletons from others -----------------------------------------------------------------------


def skeleton(tree=None, tensors=()):
    return json.dumps({"tree": tree, "tensors": list(tensors)})


PIXEL = ["x", "float32", [2], [1], "cpu"]


def test_a_skeleton_that_was_tampered_with_is_refused():
    for text in (
        "",
        "[]",
        "{}",
        "nonsense",
        '{"tree": NaN, "tensors": []}',
        '{"tree": null, "tensors": 3}',
        '{"tree": ' + "[" * 100_000 + "]" * 100_000 + ', "tensors": []}',
        skeleton(json.loads("[" * 90 + "]" * 90)),
        skeleton({}),
        skeleton({"?": 1}),
        skeleton({"d": 3}),
        skeleton({"d": [[None, 1]]}),
        skeleton({"d": [[[], 1]]}),
        skeleton({"d": [["only a key"]]}),
        skeleton({"i": 3}),
        skeleton({"i": "zz"}),
        skeleton({"f": "00"}),
        skeleton({"t": None}),
        skeleton({"x": 0}),
        skeleton({"x": -1}, [PIXEL]),
        skeleton({"x": True}, [PIXEL]),
        skeleton({"n": [0, "|O8", [1]]}, [PIXEL]),
        skeleton({"n": [0, "<f8", [9]]}, [PIXEL]),
        skeleton(None, [["x", "float32", [2], [1], "meta"]]),
        skeleton(None, [["x", "Tensor", [2], [1], "cpu"]]),
        skeleton(None, [["x", "float32", [-2], [1], "cpu"]]),
        skeleton(None, [["x", "float32", [2], [1000], "cpu"]]),
        skeleton(None, [["x", "float32", [2, 2], [0, 0], "cpu"]]),
        skeleton(None, [["x", "float32", [0], [1 << 40], "cpu"]]),
        skeleton(None, [["x", "float32", [2], [1, 1], "cpu"]]),
        skeleton(None, [["x", "float32", [1 << 60], [1], "cpu"]]),
        skeleton(None, [["x", "float32", ["2"], [1], "cpu"]]),
        skeleton(None, [["x", ["float32"], [2], [1], "cpu"]]),
        skeleton(None, [[3, "float32", [2], [1], "cpu"]]),
        skeleton(None, ["x"]),
    ):
        with pytest.raises(TransferError, match=r"^[A-Z]"):
            tensor_tree.restore(text, [torch.zeros(2)] * ("cpu" in text))


@given(st.data())
@settings(max_examples=100 * SOAK)
def test_a_skeleton_with_a_wrong_character_never_fails_in_another_way(data):
    tree = {"a": [1, 2.5, math.inf, (1 << 70, None)], 3: torch.zeros(2), "n": numpy.arange(3)}
    text, tensors = tensor_tree.flatten(tree)
    place = data.draw(st.integers(0, len(text) - 1))
    changed = text[:place] + data.draw(st.characters(codec="ascii")) + text[place + 1 :]
    with contextlib.suppress(TransferError):
        tensor_tree.restore(changed, tensors)


def test_tensors_that_do_not_fit_the_skeleton_are_refused():
    text, (tensor,) = tensor_tree.flatten([torch.zeros(2)])
    with pytest.raises(TransferError, match="Received 2 tensors for a state of 1"):
        tensor_tree.restore(text, [tensor, tensor])
    with pytest.raises(
        TransferError, match=r"The tensor for \[0\] is torch.float32 of shape \(3,\)"
    ):
        tensor_tree.restore(text, [torch.zeros(3)])


def test_a_state_too_large_to_be_written_down_is_refused(monkeypatch):
    monkeypatch.setattr(tensor_tree, "LIMIT", 100)
    with pytest.raises(TransferError, match="keep long lists of numbers in a tensor"):
        tensor_tree.flatten(list(range(1000)))
    with pytest.raises(TransferError, match="the limit of 100"):
        tensor_tree.restore(" " * 101, [])


def test_tensors_by_path_yields_every_tensor():
    tree = {"model": {"bias": torch.ones(1)}, "more": [2, torch.zeros(1)]}
    places = ["['model']['bias']", "['more'][1]"]
    assert list(dict(tensor_tree.tensors_by_path(tree))) == places
    assert [spec.path for spec in tensor_tree.specs(tensor_tree.flatten(tree)[0])] == places


def test_a_skeleton_is_written_as_it_always_was():
    weight = torch.arange(6.0).reshape(2, 3)
    tree = {
        "tied": [weight, weight],
        3: (1, 2**70, math.inf, None, True, "text"),
        "ordered": OrderedDict(a=1),
        "counted": Counter("aab"),
        "array": numpy.arange(3, dtype="<i8"),
    }
    skeleton, tensors = tensor_tree.flatten(tree)
    assert len(tensors) == 2
    assert skeleton == (
        '{"tree":{"d":[["tied",[{"x":0},{"x":0}]],'
        '[3,{"t":[1,{"i":"0x400000000000000000"},{"f":"7ff0000000000000"},null,true,"text"]}],'
        '["ordered",{"o":[["a",1]]}],["counted",{"c":[["a",2],["b",1]]}],'
        '["array",{"n":[1,"<i8",[3]]}]]},'
        '"tensors":[["[\'tied\'][0]","float32",[2,3],[3,1],"cpu"],'
        '["[\'array\']","uint8",[24],[1],"cpu"]]}'
    )
