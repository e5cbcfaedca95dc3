"""Every request answered once: logs of several ranks, any order of replies, kills, other prompts under an old id."""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.data.answering import ReplyLog, answer_all
from eyas.data.backends import Reply, Request
from eyas.data.ranks import Ranks

ASKED = [Request(f"r{n}", (5, 6, n), 4, frozenset({2})) for n in range(13)]


def reply_to(request: Request) -> Reply:
    return Reply(request, (request.prompt_ids[-1], 2), "stop")


class Echo:
    """A backend that repeats the prompt's last token, last request first, and remembers whom it answered."""

    def __init__(self, *, dies_after: int | None = None) -> None:
        self.answered: list[str] = []
        self.dies_after = dies_after

    def run(self, requests: list[Request]) -> Iterator[Reply]:
        for request in reversed(requests):
            if len(self.answered) == self.dies_after:
                raise SystemExit
            self.answered.append(request.id)
            yield reply_to(request)


class Neighbourly(Echo):
    """A backend whose replies depend on all that it is asked for together, as rounding makes them."""

    def run(self, requests: list[Request]) -> Iterator[Reply]:
        together = hashlib.sha256(" ".join(request.id for request in requests).encode()).digest()[0]
        for reply in super().run(requests):
            yield replace(reply, token_ids=(together, *reply.token_ids))


def answer(
    folder: Path, backend: Echo, asked: list[Request] = ASKED, *, ranks: Ranks | None = None, group: int = 0
) -> list[Reply]:
    ranks = ranks or Ranks()
    log = ReplyLog(folder, rows_per_part=3, rank=ranks.rank)
    return answer_all(backend, asked, log, ranks, group=group, phase="writing", progress=lambda *_: None)


def test_replies_come_in_the_order_asked_and_lie_in_whole_parts(tmp_path: Path) -> None:
    assert answer(tmp_path, Echo()) == [reply_to(request) for request in ASKED]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"part-000-{n:05d}.jsonl" for n in range(5)]
    assert [path.read_bytes().count(b"\n") for path in sorted(tmp_path.iterdir())] == [3, 3, 3, 3, 1]


def test_what_is_on_disk_is_not_asked_again(tmp_path: Path) -> None:
    answer(tmp_path, Echo(), ASKED[4:9])
    second = Echo()
    assert answer(tmp_path, second) == [reply_to(request) for request in ASKED]
    assert sorted(second.answered) == sorted(request.id for request in ASKED[:4] + ASKED[9:])
    third = Echo()
    answer(tmp_path, third)
    assert third.answered == []


def test_a_lost_part_is_asked_for_again_and_no_name_is_taken_twice(tmp_path: Path) -> None:
    answer(tmp_path, Echo())
    kept = {path: path.read_bytes() for path in tmp_path.iterdir() if path.stem != "part-000-00001"}
    (tmp_path / "part-000-00001.jsonl").unlink()
    (tmp_path / ".part-000-00005.jsonl.4711.tmp").write_text('{"id": "torn", "pro')
    again = Echo()
    assert answer(tmp_path, again) == [reply_to(request) for request in ASKED]
    assert len(again.answered) == 3
    assert {path: path.read_bytes() for path in kept} == kept
    assert not list(tmp_path.glob(".*"))


def test_a_reply_to_another_prompt_is_not_taken_over_and_not_lost(tmp_path: Path) -> None:
    other = [replace(request, prompt_ids=(9, 9, 50)) for request in ASKED[:2]]
    assert answer(tmp_path, Echo(), other)[0].token_ids == (50, 2)
    assert [reply.token_ids[0] for reply in answer(tmp_path, Echo(), ASKED[:2])] == [0, 1]
    back = Echo()
    assert answer(tmp_path, back, other)[0].token_ids == (50, 2)
    assert back.answered == []


def test_a_dropped_reply_is_remembered_with_its_fault(tmp_path: Path) -> None:
    log = ReplyLog(tmp_path, rows_per_part=1)
    dropped = Reply(ASKED[0], (), "dropped", fault="text \u201cx\u201d does not encode")
    log.add(dropped)
    log.add(Reply(ASKED[1], (7, 2), "stop", exact=False))
    assert log.read(ASKED) == {"r0": dropped, "r1": Reply(ASKED[1], (7, 2), "stop", exact=False)}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shares_are_even_and_cover_everything_once(count: int) -> None:
    shares = [Ranks(rank, count).share(ASKED) for rank in range(count)]
    assert sorted(r.id for share in shares for r in share) == sorted(r.id for r in ASKED)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert count == 1 or [Ranks(rank, count).share(reversed(ASKED)) for rank in range(count)] == shares


def test_a_single_process_keeps_the_order_asked() -> None:
    assert Ranks().share(reversed(ASKED)) == ASKED[::-1]


def together(
    folder: Path, backends: Sequence[Echo], asked: list[Request] = ASKED, *, group: int = 0
) -> list[list[Reply]]:
    """Answer on as many ranks as there are backends; one that dies breaks the others' waiting, as a launcher does."""
    barrier = threading.Barrier(len(backends))
    results: list[list[Reply]] = [[] for _ in backends]

    def wait() -> None:
        barrier.wait(timeout=20)

    def work(rank: int) -> None:
        try:
            ranks = Ranks(rank, len(backends), wait)
            results[rank] = answer(folder, backends[rank], asked, ranks=ranks, group=group)
        except (SystemExit, threading.BrokenBarrierError):
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(backends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_divide_the_work_and_all_get_all_replies(tmp_path: Path, count: int) -> None:
    backends = [Echo() for _ in range(count)]
    expected = [reply_to(request) for request in ASKED]
    assert together(tmp_path, backends) == [expected] * count
    assert sorted(name for backend in backends for name in backend.answered) == sorted(r.id for r in ASKED)
    assert min(len(backend.answered) for backend in backends) >= len(ASKED) // count


@pytest.mark.parametrize(("first", "second"), [(2, 1), (2, 3), (1, 2), (3, 2)])
def test_another_number_of_ranks_goes_on_where_the_first_broke_off(tmp_path: Path, first: int, second: int) -> None:
    dying = [Echo(dies_after=3) for _ in range(first)]
    together(tmp_path, dying)
    answered = {name for backend in dying for name in backend.answered}
    rest = [Echo() for _ in range(second)]
    assert together(tmp_path, rest) == [[reply_to(request) for request in ASKED]] * second
    assert sorted(name for backend in rest for name in backend.answered) == sorted({r.id for r in ASKED} - answered)


@pytest.mark.parametrize("counts", [(1, 1), (1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("dies_after", [1, 2, 5])
def test_groups_give_the_same_replies_whatever_was_broken_off(
    tmp_path: Path, counts: tuple[int, int], dies_after: int
) -> None:
    whole = answer(tmp_path / "whole", Neighbourly(), group=4)
    assert len({reply.token_ids[0] for reply in whole}) == 4
    assert answer(tmp_path / "other", Neighbourly()) != whole
    broken = tmp_path / "broken"
    together(broken, [Neighbourly(dies_after=dies_after) for _ in range(counts[0])], group=4)
    assert together(broken, [Neighbourly() for _ in range(counts[1])], group=4) == [whole] * counts[1]
    names = [line for part in broken.glob("part-*") for line in part.read_text().splitlines()]
    assert len(names) == len(ASKED)


def test_a_whole_group_is_not_decoded_again_and_a_broken_one_is(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        answer(tmp_path, Neighbourly(dies_after=6), group=4)
    second = Neighbourly()
    answer(tmp_path, second, group=4)
    assert sorted(second.answered) == sorted(request.id for request in ASKED[4:])
