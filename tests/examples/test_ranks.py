from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bitwitness.errors import BitwitnessError
from bitwitness.examples.ranks import Ranks, node_name

SLEEP = "import time; time.sleep(600)"


def wait(ranks: Ranks) -> None:
    deadline = time.monotonic() + 60
    while ranks.running:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_rank_knows_its_place(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "BITWITNESS_NODE", "MASTER_ADDR", "OMP_NUM_THREADS", "EXTRA")
    program = f"import os; print(*[os.environ[name] for name in {names!r}])"
    with Ranks(["-c", program], 2, 2, tmp_path, {"EXTRA": "x"}) as ranks:
        wait(ranks)
    said = [ranks.log(rank).read_text().split() for rank in range(4)]
    assert said == [
        ["0", "0", "4", "node-0", "127.0.0.1", "1", "x"],
        ["1", "1", "4", "node-0", "127.0.0.1", "1", "x"],
        ["2", "0", "4", "node-1", "127.0.0.1", "1", "x"],
        ["3", "1", "4", "node-1", "127.0.0.1", "1", "x"],
    ]


def test_the_port_listens_before_anybody_connects(tmp_path: Path) -> None:
    program = (
        "import os, socket\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "if os.environ['RANK'] == '0':\n"
        "    listener = socket.socket(fileno=int(os.environ['BITWITNESS_EXAMPLE_LISTENER']))\n"
        "    listener.accept()[0].sendall(b'hello')\n"
        "else:\n"
        "    assert 'BITWITNESS_EXAMPLE_LISTENER' not in os.environ\n"
        "    print(socket.create_connection(('127.0.0.1', port)).recv(5))\n"
    )
    with Ranks(["-c", program], 2, 1, tmp_path) as ranks:
        wait(ranks)
    assert ranks.log(1).read_text() == "b'hello'\n"


def test_a_failed_rank_ends_them_all_and_is_shown(tmp_path: Path) -> None:
    program = f"import os\nif os.environ['RANK'] == '2':\n    raise SystemExit('no more memory')\n{SLEEP}"
    with Ranks(["-c", program], 3, 1, tmp_path) as ranks:
        with pytest.raises(
            BitwitnessError, match=r"(?s)rank 2 ended with exit code 1; the end of .*no more memory"
        ) as caught:
            wait(ranks)
        assert str(ranks.log(2)) in str(caught.value)
        assert all(_is_gone(pid) for pid in ranks.pids())


def test_the_cause_is_shown_and_not_who_lost_it(tmp_path: Path) -> None:
    program = (
        "import os, time\n"
        "if os.environ['RANK'] != '2':\n"
        "    raise SystemExit('RuntimeError: Connection closed by peer')\n"
        "time.sleep(1)\n"
        "raise SystemExit('the real reason')"
    )
    with (
        Ranks(["-c", program], 3, 1, tmp_path) as ranks,
        pytest.raises(BitwitnessError, match=r"(?s)rank 2 ended.*the real reason"),
    ):
        wait(ranks)


def test_a_killed_rank_is_said_to_be_killed(tmp_path: Path) -> None:
    with Ranks(["-c", SLEEP], 2, 1, tmp_path) as ranks:
        os.kill(ranks.pids()[1], 9)
        with pytest.raises(BitwitnessError, match=r"rank 1 was killed by SIGKILL.*\n    \(it printed nothing\)"):
            wait(ranks)


def test_leaving_ends_everybody(tmp_path: Path) -> None:
    ranks = Ranks(["-c", SLEEP], 2, 2, tmp_path)

    def fail() -> None:
        with ranks:
            assert ranks.running
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(_is_gone(pid) for pid in ranks.pids())


def test_a_start_that_fails_half_way_leaves_nobody(tmp_path: Path) -> None:
    (tmp_path / "rank-00001.log").mkdir()  # rank 1 cannot open its log
    ranks = Ranks(["-c", SLEEP], 3, 1, tmp_path)
    with pytest.raises(IsADirectoryError):
        ranks.__enter__()
    assert [_is_gone(pid) for pid in ranks.pids()] == [True]


def test_names_of_nodes() -> None:
    assert [node_name(index) for index in range(3)] == ["node-0", "node-1", "node-2"]


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
