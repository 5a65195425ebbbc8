"""Stream capture, graphs, and their replay as work of a stream.

A captured operation is kept as a recipe that makes a fresh operation at each replay. A graph that is one chain replays
in the stream itself; branches get streams of their own, so that what ran side by side may do so again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cuda.bindings import driver as cuda

from .core import Refusal, api, handle, refuse, result
from .engine import ENGINE
from .machine import MACHINE, Context, current
from .streams import NON_BLOCKING, Marker, Operation, Stream, enqueue, stream_of

if TYPE_CHECKING:
    from .streams import Event

__all__ = ["Capture", "Graph", "GraphExec", "add", "forbid_legacy", "forbid_unsafe", "forbid_wait", "join", "submit"]

Recipe = Callable[[Sequence[Operation], bool], Operation]

_modes = cuda.CUstreamCaptureMode
_GLOBAL, _THREAD_LOCAL, _RELAXED = (
    int(_modes.CU_STREAM_CAPTURE_MODE_GLOBAL),
    int(_modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
    int(_modes.CU_STREAM_CAPTURE_MODE_RELAXED),
)
_status = cuda.CUstreamCaptureStatus
_capture_ids = itertools.count(1)


class Node(NamedTuple):
    """One captured operation; ``after`` are indices of earlier nodes."""

    kind: str
    recipe: Recipe
    programmatic: bool
    after: tuple[int, ...]
    number: int


class Graph:
    """Operations and their order."""

    def __init__(self, context: Context) -> None:
        self.handle = cuda.CUgraph(handle())
        self.context = context
        self.nodes: list[Node] = []


class Capture:
    """A capture that is going on. ``tails``: for each stream in it, the nodes that its next operation comes after."""

    def __init__(self, origin: Stream, mode: int) -> None:
        self.origin = origin
        self.mode = mode
        self.thread = threading.get_ident()
        self.number = next(_capture_ids)
        self.graph = Graph(origin.context)
        self.tails: dict[Stream, tuple[int, ...]] = {origin: ()}
        self.broken = False

    def invalidate(self) -> None:
        """Something was done that cannot be captured: nothing will come of it."""
        self.broken = True

    def abandon(self) -> None:
        """End it; its streams work again."""
        for stream in self.tails:
            stream.capture = None
        CAPTURES.pop(self.number, None)


class GraphExec:
    """A graph ready to run: its nodes dealt to lanes, lane 0 being the stream of the launch."""

    def __init__(self, graph: Graph) -> None:
        self.handle = cuda.CUgraphExec(handle())
        self.context = graph.context
        self.nodes = list(graph.nodes)
        self.lanes: list[int] = []
        self.last: Marker | None = None
        ends: list[int] = []  # the last node of each lane
        for index, node in enumerate(self.nodes):
            lane = next((lane for lane, end in enumerate(ends) if end in node.after), None)
            if lane is None:
                lane = len(ends)
                ends.append(index)
            ends[lane] = index
            self.lanes.append(lane)
        self.ends = ends
        self.chain = len(ends) <= 1
        self.streams = [Stream(graph.context, NON_BLOCKING, 0) for _ in ends[1:]]

    def launch(self, stream: Stream) -> None:
        """Queue everything in ``stream`` (and its side streams)."""
        before: tuple[Operation, ...] = ()
        if self.last is not None and not self.last.done:
            before = (self.last,)  # one graph does not run beside itself
        if self.chain:
            first = True
            for node in self.nodes:
                enqueue(stream, node.recipe(before, node.programmatic and not first))
                first, before = False, ()
        else:
            self._launch_branches(stream, before)
        self.last = Marker([op for op in self._tails if not op.done] if not self.chain else ())
        enqueue(stream, self.last)

    def _launch_branches(self, stream: Stream, before: tuple[Operation, ...]) -> None:
        begin = Marker(before)
        enqueue(stream, begin)
        streams = [stream, *self.streams]
        made: list[Operation] = []
        latest: list[int] = [-1] * len(streams)
        for index, (node, lane) in enumerate(zip(self.nodes, self.lanes, strict=True)):
            after = [made[i] for i in node.after if self.lanes[i] != lane] or ([begin] if latest[lane] < 0 else [])
            alone = node.after == (latest[lane],)
            made.append(node.recipe(after, node.programmatic and alone))
            latest[lane] = index
            enqueue(streams[lane], made[-1])
        self._tails = made

    _tails: Sequence[Operation] = ()


CAPTURES: Final[dict[int, Capture]] = {}
GRAPHS: Final[dict[int, Graph]] = {}
EXECS: Final[dict[int, GraphExec]] = {}


# What other modules ask


def submit(stream: Stream, make: Callable[..., Operation], kind: str) -> None:
    """Queue what ``make()`` returns, or keep the recipe if the stream is being captured."""
    if stream.capture is None:
        if stream.legacy:
            forbid_legacy(stream.context)
        enqueue(stream, make())
    else:
        add(stream, kind, lambda after, programmatic: make(after), False)


def add(stream: Stream, kind: str, recipe: Recipe, programmatic: bool) -> None:
    """Add a node at the end of a captured stream."""
    capture = _intact(stream)
    nodes = capture.graph.nodes
    nodes.append(Node(kind, recipe, programmatic, capture.tails[stream], handle()))
    capture.tails[stream] = (len(nodes) - 1,)


def record(stream: Stream, event: Event) -> None:
    """Remember where in the capture the event stands: no node of its own."""
    capture = _intact(stream)
    event.captured = (capture, capture.tails[stream])
    event.record = None


def join(stream: Stream, event: Event) -> None:
    """Make a stream go on after a captured event; one that is not being captured joins the capture."""
    assert event.captured is not None
    capture, tails = event.captured
    if capture.number not in CAPTURES:
        refuse(result.CUDA_ERROR_CAPTURED_EVENT, "the event was recorded in a capture that has ended")
    if stream.capture is None:
        if stream.legacy:
            capture.invalidate()
            refuse(result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "the legacy stream cannot join a capture")
        if stream.context is not capture.origin.context:
            capture.invalidate()
            refuse(result.CUDA_ERROR_NOT_SUPPORTED, "captures across devices are not emulated")
        stream.capture = capture
        capture.tails[stream] = tails
    elif stream.capture is capture:
        _intact(stream)
        capture.tails[stream] = tuple(sorted({*capture.tails[stream], *tails}))
    else:
        capture.invalidate()
        stream.capture.invalidate()
        refuse(result.CUDA_ERROR_STREAM_CAPTURE_MERGE, "the event belongs to another capture")


def _intact(stream: Stream) -> Capture:
    capture = stream.capture
    assert capture is not None
    if capture.broken:
        refuse(result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "the capture was invalidated by an earlier call")
    return capture


def forbid_legacy(context: Context) -> None:
    """The legacy stream waits for all blocking streams: refused while one of them is being captured."""
    for capture in list(CAPTURES.values()):
        if capture.origin.context is context and any(stream.blocking for stream in capture.tails):
            capture.invalidate()
            refuse(
                result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                "the legacy stream would wait for a stream that is being captured",
            )


def forbid_unsafe(what: str) -> None:
    """Calls that may wait for the device are refused during captures, as far as the capture modes say."""
    if not CAPTURES:
        return
    mode, me = MACHINE.local.capture_mode, threading.get_ident()
    if mode == _RELAXED:
        return
    hit = [
        capture
        for capture in list(CAPTURES.values())
        if (capture.thread == me and capture.mode != _RELAXED) or (mode == _GLOBAL and capture.mode == _GLOBAL)
    ]
    if hit:
        for capture in hit:
            capture.invalidate()
        refuse(result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, f"{what} is not allowed while a stream is being captured")


def forbid_wait(context: Context) -> None:
    """A wait for the whole context is refused while one of its streams is being captured."""
    for capture in list(CAPTURES.values()):
        if capture.origin.context is context:
            capture.invalidate()
            refuse(result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a stream of the context is being captured")


# Capture


@api()
def cuStreamBeginCapture(hStream: Any, mode: Any) -> None:
    stream = stream_of(hStream)
    if stream.legacy:
        refuse(result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the legacy stream cannot be captured")
    if stream.capture is not None:
        refuse(result.CUDA_ERROR_ILLEGAL_STATE, "the stream is being captured already")
    if int(mode) not in (_GLOBAL, _THREAD_LOCAL, _RELAXED):
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"capture mode {int(mode)}")
    capture = stream.capture = Capture(stream, int(mode))
    CAPTURES[capture.number] = capture


@api(1)
def cuStreamEndCapture(hStream: Any) -> Any:
    stream = stream_of(hStream)
    capture = stream.capture
    if capture is None:
        refuse(result.CUDA_ERROR_ILLEGAL_STATE, "the stream is not being captured")
    if capture.origin is not stream:
        capture.invalidate()
        refuse(result.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "the capture was begun on another stream")
    if capture.mode != _RELAXED and capture.thread != threading.get_ident():
        refuse(result.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "the capture was begun by another thread")
    capture.abandon()
    if capture.broken:
        refuse(result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "the capture was invalidated by an earlier call")
    _joined(capture)
    GRAPHS[int(capture.graph.handle)] = capture.graph
    return capture.graph.handle


def _joined(capture: Capture) -> None:
    """Refuse a capture in which a forked stream has work that the origin does not wait for."""
    nodes = capture.graph.nodes
    reached: set[int] = set()
    todo = list(capture.tails[capture.origin])
    while todo:
        index = todo.pop()
        if index not in reached:
            reached.add(index)
            todo += nodes[index].after
    if len(reached) != len(nodes):
        refuse(result.CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "a forked stream was not joined again")


def _status_of(stream: Stream) -> Any:
    if stream.capture is None:
        return _status.CU_STREAM_CAPTURE_STATUS_NONE
    if stream.capture.broken:
        return _status.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    return _status.CU_STREAM_CAPTURE_STATUS_ACTIVE


@api(1)
def cuStreamIsCapturing(hStream: Any) -> Any:
    stream = stream_of(hStream)
    if stream.legacy and any(c.origin.context is stream.context and c.origin.blocking for c in CAPTURES.values()):
        refuse(result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "another stream of the context is being captured")
    return _status_of(stream)


_EDGE_DATA: Final = not hasattr(cuda, "cuStreamGetCaptureInfo_v3")  # since 13.0 the edges' data are part of the answer


@api(6 if _EDGE_DATA else 5)
def cuStreamGetCaptureInfo(hStream: Any) -> tuple[Any, ...]:
    stream = stream_of(hStream)
    status, capture = _status_of(stream), stream.capture
    edges: tuple[Any, ...] = ([],) if _EDGE_DATA else ()
    if capture is None or capture.broken:
        return (status, cuda.cuuint64_t(0), cuda.CUgraph(0), [], *edges, 0)
    nodes = [cuda.CUgraphNode(capture.graph.nodes[i].number) for i in capture.tails[stream]]
    return (status, cuda.cuuint64_t(capture.number), capture.graph.handle, nodes, *edges, len(nodes))


@api(1)
def cuThreadExchangeStreamCaptureMode(mode: Any) -> Any:
    if int(mode) not in (_GLOBAL, _THREAD_LOCAL, _RELAXED):
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"capture mode {int(mode)}")
    former = MACHINE.local.capture_mode
    MACHINE.local.capture_mode = int(mode)
    return _modes(former)


# Graphs


def _graph_of(number: Any) -> Graph:
    graph = GRAPHS.get(int(number))
    if graph is None:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"no graph {int(number):#x} (destroyed?)")
    return graph


def _exec_of(number: Any) -> GraphExec:
    found = EXECS.get(number if number.__class__ is int else int(number))
    if found is None:
        refuse(result.CUDA_ERROR_INVALID_VALUE, f"no executable graph {int(number):#x} (destroyed?)")
    return found


@api(1)
def cuGraphCreate(flags: int) -> Any:
    graph = Graph(current())
    GRAPHS[int(graph.handle)] = graph
    return graph.handle


@api()
def cuGraphDestroy(hGraph: Any) -> None:
    del GRAPHS[int(_graph_of(hGraph).handle)]


@api(1)
def cuGraphInstantiate(hGraph: Any, flags: int) -> Any:
    graph = _graph_of(hGraph)
    if int(flags) != 0:
        refuse(result.CUDA_ERROR_NOT_SUPPORTED, f"instantiation flags {int(flags)} are not emulated")
    ready = GraphExec(graph)
    EXECS[int(ready.handle)] = ready
    return ready.handle


@api()
def cuGraphExecDestroy(hGraphExec: Any) -> None:
    del EXECS[int(_exec_of(hGraphExec).handle)]  # what is queued still runs


@api()
def cuGraphUpload(hGraphExec: Any, hStream: Any) -> None:
    _exec_of(hGraphExec)
    stream_of(hStream)


@api()
def cuGraphLaunch(hGraphExec: Any, hStream: Any) -> None:
    ready, stream = _exec_of(hGraphExec), stream_of(hStream)
    if ready.context is not stream.context:
        refuse(result.CUDA_ERROR_INVALID_VALUE, "the graph was captured in another context than the stream's")
    if stream.capture is not None:
        stream.capture.invalidate()
        refuse(result.CUDA_ERROR_NOT_SUPPORTED, "graphs inside of graphs are not emulated")
    if stream.legacy:
        forbid_legacy(stream.context)
    ready.launch(stream)
    if ENGINE.baton is not None:
        ENGINE.hesitate()


@api(2)
def cuGraphGetNodes(hGraph: Any, numNodes: int = 0) -> tuple[list[Any], int]:
    nodes = _graph_of(hGraph).nodes
    return [cuda.CUgraphNode(node.number) for node in nodes[:numNodes]], len(nodes)


@api(1)
def cuGraphNodeGetType(hNode: Any) -> Any:
    for graph in GRAPHS.values():
        for node in graph.nodes:
            if node.number == int(hNode):
                return getattr(cuda.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{node.kind}")
    raise Refusal(result.CUDA_ERROR_INVALID_VALUE, f"no graph node {int(hNode):#x}")
