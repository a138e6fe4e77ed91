"""Forward modes, algorithms, their registry, and the map from one step to the next."""

from __future__ import annotations

import pytest

from graphkit.errors import ConfigError
from graphkit.spec import (
    CustomSpecAlgorithm,
    ForwardMode,
    FutureMap,
    SpecAlgorithm,
    SpecConfig,
    algorithm_names,
    algorithms,
    get_algorithm,
    register_algorithm,
)
from graphkit.spec.algorithms import INTERFACE

PREDICATES = [name for name in INTERFACE if name.startswith("is_")]
TRUE_OF = {
    "NONE": {"is_none"},
    "EAGLE": {"is_eagle"},
    "EAGLE3": {"is_eagle", "is_eagle3"},
    "STANDALONE": {"is_standalone"},
    "NGRAM": set(),
    "DFLASH": {"is_dflash"},
}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(algorithms, "_custom", {})


class Medusa(CustomSpecAlgorithm):
    """Verifies one row more on the target's side."""

    def get_num_tokens_per_bs_for_target_verify(self, num_draft_tokens, is_draft_worker):
        return num_draft_tokens + (not is_draft_worker)


@pytest.mark.parametrize(
    "name", ["TARGET_VERIFY", "DRAFT", "DRAFT_EXTEND", "DRAFT_EXTEND_V2", "IDLE"]
)
def test_a_predicate_holds_for_its_mode_alone(name):
    ask = f"is_{name.lower()}"
    assert [mode.name for mode in ForwardMode if getattr(mode, ask)()] == [name]


def test_draft_extend_counts_v2_when_asked():
    asked = {mode.name for mode in ForwardMode if mode.is_draft_extend(include_v2=True)}
    assert asked == {"DRAFT_EXTEND", "DRAFT_EXTEND_V2"}


@pytest.mark.parametrize("name", SpecAlgorithm.__members__)
def test_what_is_true_of_an_algorithm(name):
    algorithm = SpecAlgorithm[name]
    assert {ask for ask in PREDICATES if getattr(algorithm, ask)()} == TRUE_OF[name]
    assert algorithm.supports_target_verify_for_draft() is (name == "DFLASH")
    assert algorithm.get_num_tokens_per_bs_for_target_verify(7, True) == 7
    assert algorithm.get_num_tokens_per_bs_for_target_verify(7, False) == 7


@pytest.mark.parametrize("text", ["EAGLE", "eagle", "Eagle", "NEXTN", "nextn"])
def test_names_ignore_case_and_may_have_an_alias(text):
    assert get_algorithm(text) is SpecAlgorithm.EAGLE


def test_an_algorithm_resolves_to_itself():
    custom = Medusa("MEDUSA")
    assert get_algorithm(SpecAlgorithm.NGRAM) is SpecAlgorithm.NGRAM
    assert get_algorithm(custom) is custom


def test_an_unknown_name_lists_those_that_exist():
    register_algorithm("medusa", Medusa)
    with pytest.raises(ConfigError, match="unknown algorithm 'medussa'") as caught:
        get_algorithm("medussa")
    assert caught.value.field == "algorithm"
    assert all(name in str(caught.value) for name in (*TRUE_OF, "NEXTN", "MEDUSA"))


def test_a_registered_class_is_made_once_under_its_name():
    register_algorithm("Medusa", Medusa)
    algorithm = get_algorithm("mEDUSA")
    assert isinstance(algorithm, Medusa)
    assert algorithm is get_algorithm("MEDUSA")
    assert (algorithm.name, repr(algorithm)) == ("MEDUSA", "Medusa('MEDUSA')")
    assert "MEDUSA" in algorithm_names()
    assert not any(getattr(algorithm, ask)() for ask in PREDICATES)
    assert algorithm.supports_target_verify_for_draft() is False


@pytest.mark.parametrize("is_draft_worker", [False, True])
def test_a_registered_algorithm_sets_the_width_of_verify(is_draft_worker):
    register_algorithm("medusa", Medusa)
    spec = SpecConfig("medusa", 3, 1, 4, is_draft_worker=is_draft_worker)
    assert spec.tokens_per_request(ForwardMode.TARGET_VERIFY) == 5 - is_draft_worker
    assert spec.tokens_per_request(ForwardMode.DRAFT_EXTEND_V2) == 4


@pytest.mark.parametrize("answer", [0, -1, None, 2.0, "4", True])
def test_a_width_that_is_no_count_is_refused(answer):
    class Odd(CustomSpecAlgorithm):
        def get_num_tokens_per_bs_for_target_verify(self, num_draft_tokens, is_draft_worker):
            return answer

    with pytest.raises(ConfigError, match=r"Odd\('O'\)\.get_num_tokens_per_bs.* got ") as caught:
        SpecConfig(Odd("O"), 3, 1, 4).tokens_per_request(ForwardMode.TARGET_VERIFY)
    assert repr(answer) in str(caught.value)


@pytest.mark.parametrize("name", ["EAGLE", "eagle", "none", "DFlash", "nextn", "MEDUSA", "medusa"])
def test_a_taken_name_is_refused_in_any_case(name):
    register_algorithm("Medusa", Medusa)
    with pytest.raises(ConfigError, match=f"name '{name}' is taken; .*NEXTN, MEDUSA") as caught:
        register_algorithm(name, Medusa)
    assert caught.value.field == "name"


def test_an_incomplete_class_is_refused_with_all_missing_methods():
    class Half:
        create_future_map = "not a method"

        def __init__(self, name):
            self.name = name

        def is_none(self):
            return False

    with pytest.raises(ConfigError, match="class Half lacks ") as caught:
        register_algorithm("half", Half)
    listed = str(caught.value).partition("lacks ")[2].partition(".")[0].split(", ")
    assert listed == [name for name in INTERFACE if name != "is_none"]
    assert "half" not in map(str.lower, algorithm_names())


@pytest.mark.parametrize("cls", [Medusa("M"), lambda name: Medusa(name), object(), None])
def test_only_a_class_can_be_registered(cls):
    with pytest.raises(ConfigError) as caught:
        register_algorithm("mine", cls)
    assert caught.value.field == "cls"


@pytest.mark.parametrize("name", [None, 5, "", b"MINE"])
def test_only_a_text_can_be_a_name(name):
    with pytest.raises(ConfigError) as caught:
        register_algorithm(name, Medusa)
    assert caught.value.field == "name"


NO_SELF = type("NoSelf", (CustomSpecAlgorithm,), {"is_none": lambda: False})
NO_SIDE = type(
    "NoSide",
    (CustomSpecAlgorithm,),
    {"get_num_tokens_per_bs_for_target_verify": lambda self, num_draft_tokens: 4},
)
MORE = type(
    "More", (CustomSpecAlgorithm,), {"create_future_map": lambda self, rows, chunk, context: 0}
)


@pytest.mark.parametrize(
    ("cls", "method"),
    [
        (NO_SELF, "is_none"),
        (NO_SIDE, "get_num_tokens_per_bs_for_target_verify"),
        (MORE, "create_future_map"),
    ],
    ids=["NoSelf", "NoSide", "More"],
)
def test_a_method_with_other_parameters_is_refused(cls, method):
    message = rf"{cls.__name__}\.{method}\(.*Give it the .*CustomSpecAlgorithm\.{method}\."
    with pytest.raises(ConfigError, match=message) as caught:
        register_algorithm("mine", cls)
    assert caught.value.field == "cls"
    assert "MINE" not in algorithm_names()
    with pytest.raises(ConfigError, match=message) as caught:
        SpecConfig(cls("MINE"), 3, 1, 4)
    assert caught.value.field == "algorithm"


def test_a_method_may_take_any_arguments_or_more_optional_ones():
    class Wide(CustomSpecAlgorithm):
        def is_none(self, strict=False):
            return strict

        def create_future_map(self, *args, **options):
            return super().create_future_map(*args, **options)

    register_algorithm("wide", Wide)
    assert SpecConfig("wide", 3, 1, 4).resolved is get_algorithm("WIDE")


def test_a_class_that_takes_no_name_is_refused():
    class Nameless(CustomSpecAlgorithm):
        def __init__(self):
            super().__init__("NAMELESS")

    with pytest.raises(ConfigError, match=r"Nameless\('MINE'\).*one parameter, the name") as caught:
        register_algorithm("mine", Nameless)
    assert caught.value.field == "cls"


def test_a_custom_algorithm_may_bring_its_own_map():
    class Relay(FutureMap):
        pass

    class Relaying(CustomSpecAlgorithm):
        def create_future_map(
            self, max_running_requests, chunked_prefill_size, context_len, device
        ):
            return Relay(max_running_requests, chunked_prefill_size, context_len, device, self)

    assert type(Relaying("R").create_future_map(1, 1, 1, "cpu")) is Relay


def overriding(name, method):
    """An algorithm with one method of its own."""
    return type("Mine", (CustomSpecAlgorithm,), {name: method})


def failing(self, *args):
    raise KeyError("draft")


@pytest.mark.parametrize("name", [*PREDICATES, "supports_target_verify_for_draft"])
def test_an_override_that_raises_is_named(name):
    cls = overriding(name, failing)
    message = rf"Mine\.{name}\(\) raised KeyError: 'draft'\. Correct the method"
    with pytest.raises(ConfigError, match=message) as caught:
        register_algorithm("mine", cls)
    assert caught.value.field == "cls"
    with pytest.raises(ConfigError, match=message) as caught:
        SpecConfig(cls("MINE"), 3, 1, 4)
    assert caught.value.field == "algorithm"
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_width_that_cannot_be_computed_is_named():
    spec = SpecConfig(overriding("get_num_tokens_per_bs_for_target_verify", failing)("M"), 3, 1, 4)
    with pytest.raises(ConfigError, match=r"for_target_verify\(4, False\) raised KeyError"):
        spec.tokens_per_request(ForwardMode.TARGET_VERIFY)


@pytest.mark.parametrize("answer", [None, 1, "no"])
def test_a_predicate_returns_a_bool(answer):
    with pytest.raises(ConfigError, match=r"Mine\.is_none\(\) must be True or False, got "):
        SpecConfig(overriding("is_none", lambda self: answer)("MINE"), 3, 1, 4)


async def later(self):
    return False


def lazily(self):
    yield False


@pytest.mark.parametrize(
    ("method", "kind"), [(later, "an async function"), (lazily, "a generator")]
)
def test_a_method_is_a_plain_function(method, kind):
    """Both return an object that is true as a condition."""
    with pytest.raises(ConfigError, match=rf"Mine\.is_none is {kind}.*Define it with def"):
        register_algorithm("mine", overriding("is_none", method))


def test_a_class_whose_call_fails_is_refused():
    for cls in (SpecAlgorithm, type("Mine", (CustomSpecAlgorithm,), {"__init__": failing})):
        with pytest.raises(ConfigError, match=rf"{cls.__name__}\('X'\) raised ") as caught:
            register_algorithm("X", cls)
        assert caught.value.field == "cls"


def test_several_draft_lengths_have_settings_each():
    spec = SpecConfig("EAGLE", [0, 1, 3], 1, 4, page_size=16)
    assert spec.is_adaptive
    assert (spec.num_steps, spec.num_draft_tokens) == ((0, 1, 3), (1, 2, 4))
    assert spec.lengths == tuple(SpecConfig("EAGLE", n, 1, n + 1, page_size=16) for n in (0, 1, 3))
    assert spec.longest is not spec
    assert spec.tokens_per_request(ForwardMode.TARGET_VERIFY) == 4
    assert SpecConfig(**{name: getattr(spec, name) for name in spec.__slots__}) == spec


def test_trees_verify_what_they_can_draft_or_what_is_asked_for():
    spec = SpecConfig("EAGLE", (0, 1, 3), 4, 16)
    assert spec.num_draft_tokens == (1, 5, 16)
    assert [each.topk for each in spec.lengths] == [1, 4, 4], "a plain step is a chain"
    assert SpecConfig("EAGLE", (2, 2), 4, (4, 9)).lengths[0].num_draft_tokens == 4


def test_a_single_length_is_itself():
    spec = SpecConfig("EAGLE", 3, 1, 4)
    assert spec.lengths == (spec,)
    assert spec.longest is spec
    assert not spec.is_adaptive


@pytest.mark.parametrize(
    ("steps", "topk", "widths", "field", "message"),
    [
        ((), 1, 4, "num_steps", "at least one draft length"),
        ((1, 3), 1, (2, 3, 4), "num_steps", "a width for each"),
        ((3, 1), 1, (4, 2), "num_steps", "expected ascending numbers"),
        ((1, 1), 1, (2, 2), "num_draft_tokens", "expected ascending numbers"),
        ((0, 3), 1, 5, "num_draft_tokens", "must be num_steps [+] 1 = 4"),
        ((0, -1), 1, 4, "num_steps", "must be an int >= 0, got -1"),
        ((1.0, 3), 1, 4, "num_steps", "must be an int >= 0, got 1.0"),
        ((1, 3), 1, "4", "num_draft_tokens", "must be an int >= 1, got '4'"),
        ("13", 1, 4, "num_steps", "must be an int >= 0, got '13'"),
    ],
)
def test_refused_draft_lengths(steps, topk, widths, field, message):
    with pytest.raises(ConfigError, match=message) as caught:
        SpecConfig("EAGLE", steps, topk, widths)
    assert caught.value.field == field
