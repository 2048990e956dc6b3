"""Flow: what is refused when built, how a step runs, and what edits do."""

from __future__ import annotations

import collections.abc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from megatron_rl.errors import DataError, FlowError
from megatron_rl.flow import Flow, Node, absent, constant, node
from megatron_rl.flow.kinds import fits, kind_text


def grpo_like() -> Flow:
    """prompts -> generate -> (reward || logprobs) -> advantages -> update."""
    nodes = [
        Node(
            "generate",
            lambda prompts: [p * 2 for p in prompts],
            {"prompts": list[int]},
            {"samples": list[int]},
            "rollout",
        ),
        Node(
            "reward",
            lambda samples: [float(s) for s in samples],
            {"samples": list[int]},
            {"scores": list[float]},
        ),
        Node(
            "logprobs",
            lambda samples: [-s for s in samples],
            {"samples": list},
            {"logprobs": list[int]},
            "policy",
        ),
        Node(
            "advantages",
            lambda scores, logprobs: {"adv": sum(scores), "kl": sum(logprobs)},
            {"scores": list[float], "logprobs": object},
            {"adv": float, "kl": int},
        ),
        Node("update", lambda adv, kl: adv + kl, {"adv": float, "kl": float}, {"loss": float}, "policy"),
    ]
    return Flow(nodes, {"prompts": list[int]})


def test_run_returns_every_output():
    values = grpo_like().run(prompts=[1, 2])
    assert values == {
        "samples": [2, 4],
        "scores": [2.0, 4.0],
        "logprobs": [-2, -4],
        "adv": 6.0,
        "kl": -6,
        "loss": 0.0,
    }


def test_run_until_runs_only_what_the_node_needs_and_returns_its_outputs():
    flow = grpo_like()
    assert flow.run(until="reward", prompts=[3]) == {"scores": [6.0]}
    assert set(flow.last_timings) == {"generate", "reward"}


def test_all_faults_are_reported_at_once_with_node_value_and_cure():
    nodes = [
        Node("a", lambda x: x, {"x": int}, {"y": int}),
        Node("a", lambda y: y, {"y": int}, {"y": int}),
        Node("b", lambda y: y, {"y": list[str]}, {"z": str}),
        Node("c", lambda scoress: 0, {"scoress": int}, {"scores": int}),
        Node("d", lambda w: w, {"w": int}, {"v": int}),
        Node("e", lambda v: v, {"v": int}, {"w": int}),
        Node("f", lambda wrong: wrong, {"y": int}, {"x": int}),
    ]
    with pytest.raises(FlowError) as caught:
        Flow(nodes, {"x": int, "idle": float})
    text = str(caught.value)
    assert "node 'a': the name is used twice" in text
    assert "node 'a', value 'y': node 'a' makes it too" in text
    assert "node 'b', value 'y': it takes list[str], but node 'a' makes int" in text
    assert "node 'c', value 'scoress': no node makes it and it is no source (did you mean 'scores'?)" in text
    assert "a cycle: 'e' needs 'v' of 'd', 'd' needs 'w' of 'e'" in text or (
        "a cycle: 'd' needs 'w' of 'e', 'e' needs 'v' of 'd'" in text
    )
    assert "node 'f': fn(wrong) cannot take inputs ['y']" in text
    assert "node 'f', value 'x': it is also a source" in text
    assert "source 'idle': no node takes it -- drop it" in text
    # The second `a` makes the `y` that it takes: a cycle of one node.
    assert text.startswith("9 faults in the flow:") and text.count(" -- ") == 9


def test_every_cycle_is_named():
    nodes = [
        Node("a", lambda q: q, {"q": int}, {"p": int}),
        Node("b", lambda p: p, {"p": int}, {"q": int}),
        Node("self", lambda s: s, {"s": int}, {"s": int}),
        Node("after", lambda s: s, {"s": int}, {"t": int}),
    ]
    with pytest.raises(FlowError, match="2 faults") as caught:
        Flow(nodes, {})
    assert "'self' needs 's' of 'self'" in str(caught.value) and "'after'" not in str(caught.value)


@pytest.mark.parametrize(
    ("made", "taken", "good"),
    [
        (bool, int, True),
        (int, float, True),
        (float, int, False),
        (list[int], list[int], True),
        (list[int], list[str], False),
        (list[bool], collections.abc.Sequence[int], True),
        (list, list[int], True),
        (list[int], list, True),
        (dict[str, int], collections.abc.Mapping[str, float], True),
        (dict[str, int], dict[int, int], False),
        (object, list[int], True),
        (list[int], Any, True),
        (int, int | None, True),
        (None, int | None, True),
        (int | None, int, False),
        (tuple[int, bool], tuple[int, ...], True),
        (tuple[int, str], tuple[int, ...], False),
        (tuple[int, ...], collections.abc.Sequence[int], True),
        ("Prompt", "Prompt", True),
        ("Prompt", int, False),
    ],
)
def test_stated_types_fit_by_class_origin_and_arguments(made, taken, good):
    assert fits(made, taken) is good, f"{kind_text(made)} -> {kind_text(taken)}"


def test_independent_nodes_run_at_the_same_time():
    def nap(x: int) -> int:
        time.sleep(0.2)
        return x

    flow = Flow(
        [Node("left", nap, {"x": int}, {"l": int}), Node("right", nap, {"x": int}, {"r": int})],
        {"x": int},
    )
    flow.run(x=1)
    (left_start, left_end), (right_start, right_end) = flow.last_timings["left"], flow.last_timings["right"]
    assert min(left_end, right_end) - max(left_start, right_start) > 0.1


def test_a_node_that_is_alone_runs_in_the_calling_thread():
    threads = []
    flow = Flow([Node("only", lambda x: threads.append(threading.current_thread()), {"x": int}, {})], {"x": int})
    assert flow.run(x=1) == {}
    assert threads == [threading.current_thread()]


def test_an_error_keeps_its_type_names_the_node_waits_for_the_running_and_starts_nothing_more():
    finished = []

    def slow(x: int) -> int:
        time.sleep(0.2)
        finished.append("slow")
        return x

    def bad(x: int) -> int:
        raise DataError("row 7 has no prompt")

    flow = Flow(
        [
            Node("slow", slow, {"x": int}, {"a": int}),
            Node("bad", bad, {"x": int}, {"b": int}),
            Node("later", lambda a: finished.append("later"), {"a": int}, {"c": object}),
        ],
        {"x": int},
    )
    with pytest.raises(DataError, match="row 7") as caught:
        flow.run(x=1)
    assert caught.value.__notes__ == ["in node 'bad' of the flow"]
    assert finished == ["slow"]


def test_two_errors_at_once_both_show():
    barrier = threading.Barrier(2)

    def fail(x: int) -> int:
        barrier.wait(5)
        raise ValueError(threading.current_thread().name)

    flow = Flow([Node(name, fail, {"x": int}, {f"out_{name}": int}) for name in ("p", "q")], {"x": int})
    with pytest.raises(ValueError) as caught:
        flow.run(x=1)
    assert "failed as well" in " ".join(caught.value.__notes__)


def test_wrong_outputs_at_run_time_name_the_node():
    flow = Flow([Node("pair", lambda x: {"a": x}, {"x": int}, {"a": int, "b": int})], {"x": int})
    with pytest.raises(FlowError, match=r"node 'pair' declares the outputs \['a', 'b'\] but returned \['a'\]"):
        flow.run(x=1)


def test_missing_and_unknown_source_values_are_refused():
    flow = grpo_like()
    with pytest.raises(FlowError, match=r"needs the source value\(s\) \['prompts'\]"):
        flow.run()
    with pytest.raises(FlowError, match=r"'prompt', which is no source \(did you mean 'prompts'\?\)"):
        flow.run(prompt=[1])
    with pytest.raises(FlowError, match=r"no node 'rewards' \(did you mean 'reward'\?\)"):
        flow.run(until="rewards", prompts=[1])


def test_replace_takes_a_function_a_node_or_a_constant():
    flow = grpo_like()
    flow.replace("reward", lambda samples: [1.0 for _ in samples])
    assert flow.run(until="advantages", prompts=[1, 2]) == {"adv": 2.0, "kl": -6}
    flow.replace("logprobs", Node("zeros", lambda samples: [0], {"samples": list[int]}, {"logprobs": list[int]}))
    assert flow.run(until="advantages", prompts=[1, 2])["kl"] == 0
    flow.replace("advantages", constant({"adv": 0.5, "kl": 1}))
    assert flow.run(until="update") == {"loss": 1.5}, "a constant needs nothing upstream"
    assert set(flow.last_timings) == {"advantages", "update"}
    with pytest.raises(FlowError, match="give a dict with exactly these names"):
        flow.replace("advantages", constant(0))


def test_a_faulty_edit_changes_nothing():
    flow = grpo_like()
    before = flow.describe()
    with pytest.raises(FlowError, match=r"node 'generate', value 'rows': no node makes it"):
        flow.replace("generate", lambda rows: rows)
    assert flow.describe() == before


def test_insert_after_with_a_function_maps_the_value_for_all_consumers():
    flow = grpo_like()

    def shaping(scores):
        return [score + 10 for score in scores]

    flow.insert_after("reward", shaping)
    values = flow.run(prompts=[1, 2])
    assert values["scores"] == [12.0, 14.0] and values["reward.scores"] == [2.0, 4.0] and values["adv"] == 26.0
    flow.insert_after("reward", lambda scores: [score * 2 for score in scores])
    assert flow.run(prompts=[1, 2])["scores"] == [14.0, 18.0], "the newest insert stands right behind its node"
    assert [node.name for node in flow.nodes][1:4] == ["reward", "after_reward", "shaping"]


def test_insert_after_with_a_node():
    flow = grpo_like()
    seen = []
    flow.insert_after("reward", Node("watch", lambda scores: seen.append(scores), {"scores": list[float]}, {}))
    flow.insert_after(
        "advantages",
        Node(
            "shift",
            lambda adv, prompts: adv + len(prompts),
            {"adv": float, "prompts": list[int]},
            {"adv": float},
        ),
    )
    values = flow.run(prompts=[1, 2])
    assert seen == [[2.0, 4.0]] and values["adv"] == 8.0 and values["loss"] == 2.0
    with pytest.raises(FlowError, match=r"takes none of \['samples'\]"):
        flow.insert_after("generate", Node("stray", lambda prompts: 0, {"prompts": list[int]}, {"n": int}))
    with pytest.raises(FlowError, match="maps exactly one"):
        flow.insert_after("advantages", lambda adv: adv)


def test_describe_lists_the_nodes_in_the_order_in_which_they_can_run():
    lines = grpo_like().describe().splitlines()
    assert lines[0].split() == ["wave", "node", "inputs", "->", "outputs", "group"]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["0", "(sources)"],
        ["1", "generate"],
        ["2", "reward"],
        ["2", "logprobs"],
        ["3", "advantages"],
        ["4", "update"],
    ]
    assert "scores, logprobs -> adv: float, kl: int" in lines[5] and lines[2].endswith("rollout")


@dataclass(frozen=True)
class Scored:
    scores: list[float]
    num_failed: int


def score(factor: int, samples: list[int], bonus: float | None = None) -> Scored:
    return Scored([float(factor * one) + (bonus or 0.0) for one in samples], 0)


def mean(scores: list[float]) -> float:
    return sum(scores) / len(scores)


def show(mean: float, num_failed: int) -> dict[str, float]:
    return {"mean": mean, "failed": float(num_failed)}


def annotated() -> Flow:
    return Flow([node(score, 2, group="reward"), absent("bonus"), node(mean)], {"samples": list[int]})


def test_a_node_reads_names_and_types_from_annotations_and_a_dataclass_is_several_outputs():
    made = node(score, 2, group="reward")
    assert (made.name, made.inputs, made.group) == ("score", {"samples": list[int], "bonus": float | None}, "reward")
    assert made.outputs == {"scores": list[float], "num_failed": int} and made.optional == {"bonus"}
    assert node(mean).outputs == {"mean": float} and node(mean, gives="average").outputs == {"average": float}
    assert annotated().run(samples=[1, 2]) == {"scores": [2.0, 4.0], "num_failed": 0, "mean": 3.0}


def test_a_value_with_a_default_is_absent_only_where_the_flow_says_so():
    """A mistyped optional input would else be left at its default without a word."""
    with pytest.raises(FlowError, match=r"node 'score', value 'bonus': no node makes it"):
        Flow([node(score, 2), node(mean)], {"samples": list[int]})
    with pytest.raises(
        FlowError, match=r"value 'samples': it is absent from this flow -- give the parameter a default"
    ):
        Flow([node(score, 2), absent("bonus"), absent("samples")], {})
    with pytest.raises(FlowError, match=r"node 'mean', value 'mean': it is also said to be absent"):
        Flow([node(score, 2), absent("bonus"), absent("mean"), node(mean)], {"samples": list[int]})


def test_what_reads_values_after_the_run_is_checked_before_it():
    flow = annotated()
    flow.watch([node(show)])
    assert flow.read(flow.run(samples=[1, 2])) == [{"mean": 3.0, "failed": 0.0}]

    def typo(means: float) -> dict[str, float]:
        return {"mean": means}

    def mistaken(mean: list[int]) -> dict[str, float]:
        return {}

    with pytest.raises(FlowError, match=r"node 'typo', value 'means': .*did you mean 'mean'\?"):
        flow.watch([node(typo)])
    with pytest.raises(
        FlowError, match=r"node 'mistaken', value 'mean': it takes list\[int\], but node 'mean' makes float"
    ):
        flow.watch([node(mistaken)])
    with pytest.raises(FlowError, match=r"node 'show', value 'num_failed': no node makes it"):
        flow.replace("score", Node("plain", lambda samples: samples, {"samples": list[int]}, {"scores": list[float]}))


def test_a_step_runs_in_parts_and_nothing_runs_twice():
    """`until` and `before` leave the rest for later; a value stands for its node; watchers run once, too."""
    whole, flow, seen = grpo_like().run(prompts=[1, 2]), grpo_like(), list[float]()
    flow.insert_after("reward", Node("watch", lambda scores: seen.extend(scores), {"scores": list[float]}, {}))
    flow.insert_after("generate", lambda samples: samples)
    sampled = flow.advance(flow.begin(prompts=[1, 2]), until=["samples"])
    assert sampled.done == {"generate", "after_generate"} and sampled.values["samples"] == [2, 4] and not seen
    learned = flow.advance(sampled, before="loss")
    assert learned.done - sampled.done == {"reward", "logprobs", "advantages", "watch"} and seen == [2.0, 4.0]
    end = flow.advance(learned)
    assert end.done - learned.done == {"update"} and end.timings.keys() == end.done and seen == [2.0, 4.0]
    assert {name: end.values[name] for name in whole} == whole


def test_whoever_tells_of_a_step_hears_of_each_node_as_it_begins_and_ends():
    heard: list[str] = []

    @contextmanager
    def during(name: str) -> Iterator[None]:
        heard.append(f"{name} begins")
        try:
            yield
        finally:
            heard.append(f"{name} ends")

    def fails(doubled: int) -> int:
        raise ValueError("no")

    def double(number: int) -> int:
        return 2 * number

    flow = Flow([node(double, gives="doubled"), node(fails, gives="never")], {"number": int})
    flow.during = during
    with pytest.raises(ValueError, match="no"):
        flow.run(number=1)
    assert heard == ["double begins", "double ends", "fails begins", "fails ends"]


def test_what_has_no_name_is_refused():
    with pytest.raises(FlowError, match=r"\['values'\] cannot be passed by name"):
        node(lambda *values: 0, name="sum")
    with pytest.raises(FlowError, match="give the node one"):
        node(print.__class__)
