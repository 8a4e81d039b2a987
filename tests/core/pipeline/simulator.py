"""A pipe that is simulated: it runs a schedule's table as hardware would, and notices what is not there.

Letters: p stages; microbatch i, stage s, chunk c, virtual stage k = c·p + s.
"""

from hypothesis import strategies as st

from megajax.core.pipeline.table import IDLE, Pass, Schedule

TABLES = ["microbatch", "chunk", "slot", "arrival", "source"]
all_arguments = st.one_of(
    st.tuples(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 8), st.integers(1, 20), st.just(1)),
    st.tuples(st.just("interleaved"), st.integers(2, 8), st.integers(1, 20), st.integers(2, 4)),
)


class Slots(list):
    """Memory of some slots; each is written, read once, and then free."""

    def __init__(self, size: int):
        super().__init__([None] * size)
        self.peak = 0

    def put(self, slot: int, token: tuple) -> None:
        assert 0 <= slot < len(self), "no such slot"
        assert self[slot] is None, "overwritten before it was read"
        self[slot] = token
        self.peak = max(self.peak, self.used)

    def take(self, slot: int) -> tuple:
        assert 0 <= slot < len(self), "no such slot"
        token, self[slot] = self[slot], None
        assert token is not None, "nothing is there"
        return token

    @property
    def used(self) -> int:
        return len(self) - self.count(None)


class Stage:
    """One stage of a simulated pipe: its memory, what lies on its wires, and what it has run, as (microbatch, k)."""

    def __init__(self, schedule: Schedule):
        self.saved = Slots(schedule.num_slots)
        self.inboxes = Slots(schedule.forward.inbox_depth), Slots(schedule.backward.inbox_depth)
        self.wires: list[tuple | None] = [None, None]
        self.done: tuple[list, list] = [], []  # forward and backward
        self.peak = 0  # of what it has run forward and not yet backward

    def receive(self, direction: int, table: Pass, slot: int) -> tuple:
        token = self.inboxes[direction].take(slot)
        assert not table.direct or token is self.wires[direction], "it came earlier, and there is no inbox"
        return token


def simulate(schedule: Schedule) -> list[Stage]:
    """Run the table as hardware would: (microbatch, route) tokens are sent, stored and read where the table says.

    An activation carries the virtual stages that it went through up, a gradient those that it came through down.
    """
    p, last = schedule.num_stages, schedule.num_stages * schedule.num_chunks - 1
    keeps = (schedule.backward.microbatch != IDLE).any()
    pipe = [Stage(schedule) for _ in range(p)]
    assert p == 1 or not schedule.fused, "the stages of a pipe hand over between forward and backward"
    for tick in range(schedule.num_ticks):
        sent: tuple[list, list] = [None] * p, [None] * p
        for s, stage in enumerate(pipe):
            for direction, table in enumerate((schedule.forward, schedule.backward)):
                arrived, slot = stage.wires[direction], int(table.arrival[tick, s])
                assert (arrived is None) == (slot == IDLE), "stored without an arrival, or arrived and not stored"
                if arrived is not None:
                    stage.inboxes[direction].put(slot, arrived)
            up, down = (
                {name: int(getattr(table, name)[tick, s]) for name in TABLES}
                for table in (schedule.forward, schedule.backward)
            )
            handed = None  # from forward to backward where both are one
            if up["microbatch"] != IDLE:
                i, k = up["microbatch"], up["chunk"] * p + s
                x = (i, ()) if k == 0 else stage.receive(0, schedule.forward, up["source"])
                assert x == (i, tuple(range(k))), "the input is not there"
                y = (i, (*x[1], k))
                stage.done[0].append((i, k))
                if k != last:
                    sent[0][(s + 1) % p] = y
                if schedule.fused and k == last:
                    handed = y
                elif keeps:
                    stage.saved.put(up["slot"], y)
            stage.peak = max(stage.peak, stage.saved.used + (handed is not None))
            if down["microbatch"] != IDLE:
                i, k = down["microbatch"], down["chunk"] * p + s
                kept = handed if schedule.fused and k == last else stage.saved.take(down["slot"])
                assert kept == (i, tuple(range(k + 1))), "what was saved is another's"
                gradient = (i, ()) if k == last else stage.receive(1, schedule.backward, down["source"])
                assert gradient == (i, tuple(range(last, k, -1))), "the gradient is not there"
                stage.done[1].append((i, k))
                if k != 0:
                    sent[1][(s - 1) % p] = (i, (*gradient[1], k))
        for s, stage in enumerate(pipe):
            stage.wires = [sent[0][s], sent[1][s]]
    for s, stage in enumerate(pipe):
        work = sorted((i, c * p + s) for i in range(schedule.num_microbatches) for c in range(schedule.num_chunks))
        assert [sorted(done) for done in stage.done] == [work, work if keeps else []], "not every pass once"
        assert not any((*stage.saved, *stage.inboxes[0], *stage.inboxes[1], *stage.wires)), "something is left over"
    return pipe
