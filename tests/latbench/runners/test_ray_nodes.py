"""What is asked of Ray, and what is made of its answers: with a stand-in for Ray, so that none has to run."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import node_tasks
import pytest

from latbench.errors import EnvironmentUnusable, Incomplete
from latbench.runners.block_scheduler import LostNodes, Node
from latbench.runners.ray_nodes import (
    ADDRESS_VARIABLE,
    RayNodes,
    check_reachable,
    explain_loss,
    parse_nodes,
    select_nodes,
)

TASKS = Path(node_tasks.__file__)


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause
        super().__init__(f"a traceback\n{cause}")


DIED = "The actor died unexpectedly.\n\tpid: 7\nThe actor is dead because its node has died. Node Id: 9."


def described(name: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    """A node as ray.nodes() tells of it."""
    resources = {key.replace("__", ":"): value for key, value in resources.items()}
    address = {"NodeManagerHostname": name, "NodeManagerAddress": "10.0.0.1"}
    return {"NodeID": name, "Alive": alive, "Resources": {**resources, f"node:{name}": 1.0}, **address}


A100 = {"CPU": 8.0, "GPU": 1.0, "accelerator_type__A100": 1.0}


class FakeRay(ModuleType):
    """Ray as far as it is used: everything runs at once in this process. The calls that `deaths` counts per node, its
    first as the holder of a callable, lose that node's actor; `dead` nodes stay so.
    """

    def __init__(self, *nodes: dict[str, Any], deaths: dict[str, list[int]] | None = None) -> None:
        super().__init__("ray")
        self.described = list(nodes)
        self.deaths = deaths or {}
        self.calls: dict[str, int] = {}
        self.held: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.killed = self.shut = 0
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        self.busy = False

    def init(self, address: str, **options: Any) -> None:
        if address == "auto" and not self.described:
            raise ConnectionError("Could not find any running Ray instance.\nMore of it.")

    def nodes(self) -> list[dict[str, Any]]:
        return self.described

    def shutdown(self) -> None:
        self.shut += 1

    def kill(self, actor: Any) -> None:
        self.killed += 1

    def remote(self, work: Any) -> Any:
        return SimpleNamespace(options=lambda **options: FakeRemote(self, work, options))

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        self.busy, busy = False, self.busy
        return ([], refs) if busy else (refs, [])

    def get(self, ref: Callable[[], Any], timeout: float | None = None) -> Any:
        return ref()


class FakeRemote:
    """A function or a class that is to run with `options`."""

    def __init__(self, ray: FakeRay, work: Any, options: dict[str, Any]) -> None:
        self.ray, self.work, self._options = ray, work, options
        self.node = options["scheduling_strategy"]

    def remote(self, *args: Any) -> Any:
        if not isinstance(self.work, type):
            self.ray.asked.append(self._options["runtime_env"])
            return self._later(lambda: self.work(*args))
        self.ray.held.append(self._options)
        actor = self.work()

        def method(name: str) -> Any:
            return SimpleNamespace(
                remote=lambda *args: self._later(lambda: getattr(actor, name)(*args), counted=True)
            )

        return SimpleNamespace(prepare=method("prepare"), call=method("call"))

    def _later(self, run: Callable[[], Any], counted: bool = False) -> Callable[[], Any]:
        def answer() -> Any:
            if counted:
                self.ray.calls[self.node] = number = self.ray.calls.get(self.node, 0) + 1
                if number in self.ray.deaths.get(self.node, ()):
                    raise RayError(DIED)
            try:
                return run()
            except Exception as error:  # noqa: BLE001 - as Ray does
                raise RayTaskError(error) from None

        return answer


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeRay], FakeRay]:
    def use(ray: FakeRay) -> FakeRay:
        strategies = ModuleType("ray.util.scheduling_strategies")
        strategies.NodeAffinitySchedulingStrategy = lambda node, soft: node  # type: ignore[attr-defined]
        for name, module in {"ray": ray, "ray.util": ModuleType("ray.util"), strategies.__name__: strategies}.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
        return ray

    return use


TRIPLE = (f"{TASKS}:tool", 3)


def answers(nodes: RayNodes, numbers: list[Any], **options: Any) -> dict[Any, Any]:
    return dict(nodes.run(TRIPLE, numbers, lambda number: (number,), **options))


def test_whole_nodes_are_taken_and_given_back(use: Callable[[FakeRay], FakeRay], capsys: Any) -> None:
    ray = use(FakeRay(described("a", **A100), described("b", **A100), described("c", CPU=4.0)))
    with RayNodes("a100") as nodes:
        print("what Ray prints of its nodes")
        assert nodes.ask("builtins:len", "four") == dict.fromkeys(nodes.nodes, 4)
        assert not ray.held
        assert answers(nodes, [1, 2, 3]) == {1: 3, 2: 6, 3: 9}
        assert answers(nodes, [4]) == {4: 12}
        assert answers(nodes, []) == {}
    assert [(held["num_cpus"], held["num_gpus"], held["scheduling_strategy"]) for held in ray.held] == [
        (8.0, 1.0, "a"),
        (8.0, 1.0, "b"),
    ]
    assert ray.shut == 1 and capsys.readouterr().out == ""


def test_what_a_lost_node_had_goes_elsewhere_and_the_node_comes_back(use: Callable[[FakeRay], FakeRay]) -> None:
    ray = use(FakeRay(described("a", **A100), described("b", **A100), deaths={"a": [2]}))
    with RayNodes("a100") as nodes:
        assert answers(nodes, [1, 2, 3, 4]) == {1: 3, 2: 6, 3: 9, 4: 12}
        assert nodes.lost == {"a (10.0.0.1)": "node a (10.0.0.1) was lost: its node has died"}
        assert [node.id for node in nodes.nodes] == ["a", "b"]
    assert ray.killed == 1 and [held["scheduling_strategy"] for held in ray.held] == ["a", "b", "a"]


def test_what_loses_its_nodes_again_is_not_tried_for_ever(use: Callable[[FakeRay], FakeRay]) -> None:
    use(FakeRay(*(described(name, **A100) for name in "abc"), deaths={"a": [2], "b": [2]}))
    with RayNodes("a100") as nodes:
        found = answers(nodes, [1])
    reasons = tuple(f"node {name} (10.0.0.1) was lost: its node has died" for name in "ab")
    assert found == {1: LostNodes(reasons)}


def test_a_node_that_cannot_hold_is_left_alone_and_no_node_at_all_is_said(use: Callable[[FakeRay], FakeRay]) -> None:
    use(FakeRay(described("a", **A100), described("b", **A100), deaths={"a": [1, 2]}))
    with RayNodes("a100") as nodes:
        assert answers(nodes, [1, 2, 3]) == {1: 3, 2: 6, 3: 9}
        assert len(nodes.lost) == 1 and [each.id for each in nodes.nodes] == ["b"]
    ray = use(FakeRay(described("a", **A100), deaths={"a": [2]}))
    with RayNodes("a100") as nodes:
        ray.described = [described("a", alive=False, **A100)]
        with pytest.raises(Incomplete, match="every node that could measure is lost"):
            answers(nodes, [1])


def test_a_node_whose_disk_is_full_is_done_without_and_its_items_are_not_blamed(
    use: Callable[[FakeRay], FakeRay], tmp_path: Path
) -> None:
    def tripled(folder: str, full: int) -> dict[Any, Any]:
        ray = use(FakeRay(*(described(name, **A100) for name in "abc")))
        (tmp_path / folder).mkdir()
        with RayNodes("a100") as nodes:
            prepare = (f"{TASKS}:tool_of_a_full_disk", str(tmp_path / folder), full)
            found = dict(nodes.run(prepare, [1, 2, 3, 4], lambda number: (number,), tries=1))
            assert [each.id for each in nodes.nodes] == list("abc"[full:]) and ray.killed == full
            assert list(nodes.lost.values()) == [
                f"on node {name} (10.0.0.1): OSError: [Errno 28] No space left on device; it is left out"
                for name in "abc"[:full]
            ]
        return found

    assert tripled("one", 1) == tripled("two", 2) == {1: 3, 2: 6, 3: 9, 4: 12}
    with pytest.raises(Incomplete, match=r"every node that could measure is lost: on node c .* No space left"):
        tripled("all", 3)


def test_what_a_node_refuses_names_the_node(use: Callable[[FakeRay], FakeRay]) -> None:
    use(FakeRay(described("a", **A100)))
    with RayNodes("a100") as nodes:
        with pytest.raises(EnvironmentUnusable, match=r"^on node a \(10.0.0.1\): --gpu a100 requested, but "):
            nodes.ask(f"{TASKS}:refuse")
        with pytest.raises(
            EnvironmentUnusable, match=r"^on node a .*: ModuleNotFoundError: No module named 'nowhere'$"
        ):
            nodes.ask("nowhere:look")
        with pytest.raises(RayTaskError, match="a traceback"):  # a fault of ours stays one
            answers(nodes, [None])


def test_who_waits_for_nodes_hears_it(use: Callable[[FakeRay], FakeRay]) -> None:
    ray, heard = use(FakeRay(described("a", **A100))), []
    with RayNodes("a100") as nodes:
        ray.busy = True
        assert answers(nodes, [1], waiting=lambda: heard.append("waiting")) == {1: 3}
    assert heard == ["waiting"]


def test_arguments_are_asked_for_when_their_turn_comes(use: Callable[[FakeRay], FakeRay]) -> None:
    use(FakeRay(described("a", **A100)))
    order: list[str] = []
    with RayNodes("a100") as nodes:
        for item, _ in nodes.run(TRIPLE, [1, 2], lambda item: order.append(f"asked {item}") or (item,)):
            order.append(f"answered {item}")
    assert order == ["asked 1", "answered 1", "asked 2", "answered 2"]


def node(name: str, *, cpus: float = 4.0, gpus: float = 0.0, kinds: tuple[str, ...] = ()) -> Node:
    return Node(name, name, cpus, gpus, kinds)


def test_nodes_are_chosen_by_accelerator() -> None:
    nodes = [
        node("head", cpus=0.0),
        node("plain"),
        node("big", gpus=8.0, kinds=("A100",)),
        node("game", gpus=1.0, kinds=("GeForce-RTX-3090",)),
        node("desk", gpus=1.0, kinds=("RTX-A6000",)),
    ]
    wanted = {"a100": ["big"], "rtx3090": ["game"], "rtxa6000": ["desk"], None: ["plain"]}
    wanted |= {"A100-SXM4-80GB": ["big"], "RTX 3090": ["game"], "nvidia-rtx-a6000": ["desk"]}
    assert {name: [each.name for each in select_nodes(nodes, name)] for name in wanted} == wanted


def test_a_missing_accelerator_is_said_with_those_that_there_are() -> None:
    nodes = [
        node("a", gpus=1.0, kinds=("A100",)),
        node("b", gpus=1.0, kinds=("A100",)),
        node("c", gpus=1.0, kinds=("T4",)),
    ]
    with pytest.raises(
        EnvironmentUnusable, match=r"^--gpu h100 requested, .*: they have A100 \(2 nodes\), T4 \(1 node\)$"
    ):
        select_nodes(nodes, "h100")
    with pytest.raises(EnvironmentUnusable, match="they have no GPU"):
        select_nodes([node("plain")], "h100")
    with pytest.raises(EnvironmentUnusable, match=r"--cpu measures nodes without an accelerator, .* T4 \(1 node\)"):
        select_nodes(nodes[2:], None)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("A100", "a10"), ("A10G", "a10"), ("RTX-4090", "rtx-4090-d"), ("L40S", "l40"), ("RTX", "rtx4090")],
)
def test_nodes_with_another_chip_of_a_similar_name_are_not_chosen(kind: str, wanted: str) -> None:
    with pytest.raises(EnvironmentUnusable, match="no node of the Ray cluster has it"):
        select_nodes([node("a", gpus=1.0, kinds=(kind,))], wanted)


def test_a_survey_keeps_the_gpus_of_a_node_visible(use: Callable[[FakeRay], FakeRay]) -> None:
    ray = use(FakeRay(described("a", **A100)))
    with RayNodes("a100") as nodes:
        nodes.ask("builtins:len", "four")
    assert ray.asked == [{"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}]


def test_dead_nodes_do_not_count() -> None:
    assert parse_nodes([described("a", alive=False, **A100)]) == []


@pytest.mark.parametrize(
    ("said", "short"),
    [
        (DIED, "its node has died"),
        (
            "The actor 9b is unavailable: RpcError: Socket closed rpc_code: 14. It may.",
            "it cannot be reached any more",
        ),
        (
            "Task was killed due to the node running low on memory.\nMemory: 9",
            "Task was killed due to the node running low on memory.",
        ),
        ("", "RayError"),
    ],
)
def test_pages_of_reasons_become_a_few_words(said: str, short: str) -> None:
    assert explain_loss(RayError(said)) == short


def test_an_address_where_nobody_listens_is_said_at_once() -> None:
    with pytest.raises(EnvironmentUnusable, match=r"cannot reach a Ray cluster at 127.0.0.1:1 \(.*\): start one"):
        check_reachable("127.0.0.1:1")
    check_reachable("auto")


def test_ray_that_is_not_installed_is_said(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = latbench("sweep", "--gpu", "a100", "--on", "ray").refused(3)
    assert said == "latbench: Ray is not installed here: pip install ray"


def test_no_cluster_is_said_in_one_line(latbench: Any, use: Callable[[FakeRay], FakeRay]) -> None:
    use(FakeRay())
    said = latbench("sweep", "--cpu", "--on", "ray").refused(3)
    assert said.startswith(
        "latbench: cannot reach a Ray cluster (Could not find any running Ray instance.): start one"
    )


def test_a_gpu_that_no_node_has_or_nobody_knows_is_refused(latbench: Any, use: Callable[[FakeRay], FakeRay]) -> None:
    use(FakeRay(described("a", **A100)))
    assert "no node of the Ray cluster has it: they have A100 (1 node)" in (
        latbench("sweep", "--gpu", "h100", "--on", "ray").refused(3)
    )
    assert "unknown GPU 'x100'" in latbench("sweep", "--gpu", "x100", "--on", "ray").refused(2)
    assert "not 'moon'" in latbench("sweep", "--gpu", "a100", "--on", "moon").refused(2)
