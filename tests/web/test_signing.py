"""Guessing secrets: how often, at what cost, and that it keeps no owner of a secret out."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import threading
import time
from pathlib import Path

import anyio
import pytest

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clients import network
from bitwitness.web.hashing import (
    DUMMY,
    DUMMY_TOKEN,
    OF_TOKEN,
    USUAL,
    Cost,
    hashed,
    id_of,
    is_hash,
    make_token,
    matches,
)
from bitwitness.web.limiting import Buckets
from bitwitness.web.sessions import IDLE_SECONDS, LONGEST_SECONDS, Sessions
from bitwitness.web.signing import WRONG, Refused, Signing
from bitwitness.web.users import OneToken, User, UsersFile, add, read, remove, write

CHEAP = Cost(4, 1, 1)
PASSWORD = "correct horse battery staple"


class Fixed:
    """Users who cost nothing to check."""

    def __init__(self, *names: str) -> None:
        self.users = {name: User(name, "operator", hashed(PASSWORD, CHEAP)) for name in names}

    def named(self, name: str) -> User | None:
        return self.users.get(name)

    def of_token(self, token_id: str) -> User | None:
        return None


def tried(signing: Signing, name: str, secret: str, client: str = "192.0.2.1", browser: str = "") -> int:
    """The status of a try."""
    try:
        anyio.run(signing.sign_in, name, secret, client, browser)
    except Refused as refused:
        found = refused
    else:
        return 200
    assert (found.wait > 0) == (found.status != 401)
    return found.status


# Guessing -------------------------------------------------------------------------------------------------------------


def test_one_client_has_a_few_tries_and_then_one_every_some_seconds() -> None:
    now = [0.0]
    signing = Signing(Fixed("ada", *(f"name-{i}" for i in range(12))), clock=lambda: now[0])
    assert [tried(signing, f"name-{i}", "wrong") for i in range(12)] == [401] * 10 + [429] * 2
    assert tried(signing, "ada", PASSWORD) == 429  # right, and yet not looked at
    now[0] += 15
    assert [tried(signing, "ada", PASSWORD) for _ in range(3)] == [200] * 3  # who is right is not counted
    assert tried(signing, "ada", PASSWORD, "192.0.2.2") == 200


def test_an_address_of_one_network_is_no_other_client() -> None:
    assert network("2001:db8::1") == network("2001:db8::2:3") != network("2001:db8:0:1::1")
    assert network("::ffff:192.0.2.1") == network("192.0.2.1") != network("192.0.2.2")
    assert network("") == ""


def test_many_clients_share_the_tries_of_a_name_and_all_names_those_of_all() -> None:
    signing = Signing(Fixed("ada", *(f"name-{i}" for i in range(25))), clock=lambda: 0.0)
    clients = (f"192.0.2.{i}" for i in itertools.count())
    assert [tried(signing, "ada", "wrong", next(clients)) for _ in range(12)] == [401] * 10 + [429] * 2
    spread = [tried(signing, f"name-{i}", "wrong", next(clients)) for i in range(25)]
    assert spread == [401] * 20 + [429] * 5


def test_who_tries_from_elsewhere_without_end_keeps_nobody_out_who_was_here_before() -> None:
    now = [0.0]
    signing = Signing(Fixed("ada", "bob"), clock=lambda: now[0])
    browser = signing.remember("ada")
    for second in range(60):
        now[0] = float(second)
        for i in range(5):
            tried(signing, "ada", "wrong", f"198.51.{second}.{i}")
        assert tried(signing, "ada", PASSWORD, "203.0.113.9", browser) == 200
        assert (
            tried(signing, "ada", PASSWORD, f"198.51.{second}.0", browser) == 200
        )  # behind the same proxy as the attacker
    assert tried(signing, "ada", PASSWORD, "203.0.113.10") == 429
    now[0] += 10  # after the attack, a new browser waits no longer than this
    assert tried(signing, "ada", PASSWORD, "203.0.113.10") == 200


def test_a_browser_that_is_known_has_no_endless_tries_and_is_of_one_name() -> None:
    signing = Signing(Fixed("ada", "bob"), clock=lambda: 0.0)
    browser = signing.remember("ada")
    assert [tried(signing, "ada", "wrong", "192.0.2.1", browser) for _ in range(12)] == [401] * 10 + [429] * 2
    assert [tried(signing, "bob", "wrong", "192.0.2.3", browser) for _ in range(12)] == [401] * 10 + [429] * 2
    forged = browser.partition(".")[0] + "." + "0" * 64
    assert tried(Signing(Fixed("ada"), clock=lambda: 0.0), "ada", PASSWORD, browser=browser) == 200
    assert tried(signing, "ada", PASSWORD, "192.0.2.3", forged) == 429


@pytest.mark.skipif(not os.environ.get("BITWITNESS_EXHAUSTIVE"), reason="hashes for seconds")
def test_the_time_tells_nobody_which_names_there_are(tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    add(path, "program", "viewer")
    write(path, (*read(path), User("ada", "operator", hashed(PASSWORD))))
    costs, signing = dict[str, float](), Signing(UsersFile(path))
    for name in ("ada", "nobody", "program"):
        begun = time.process_time()
        assert tried(signing, name, "a wrong password") == 401
        costs[name] = time.process_time() - begun
    assert max(costs.values()) < 4 * min(costs.values()), costs


def test_nobody_learns_which_names_there_are(tmp_path: Path) -> None:
    """The same words, and the same work: whoever has no password is compared with one that costs as much."""
    path = tmp_path / "users.json"
    token = add(path, "program", "viewer")
    write(path, (*read(path), User("ada", "operator", hashed(PASSWORD, CHEAP))))
    signing = Signing(UsersFile(path))
    for name in ("ada", "nobody"):
        with pytest.raises(Refused, match=f"^{WRONG}$"):
            anyio.run(signing.sign_in, name, "a wrong password", "192.0.2.1", "")
    assert DUMMY.split("$")[1] == f"{USUAL.log_n}:{USUAL.r}:{USUAL.p}"
    # One who has a token is not found faster by it than one who has none.
    assert DUMMY_TOKEN.split("$")[1] == hashed(token, OF_TOKEN).split("$")[1]
    with pytest.raises(Refused, match=f"^{WRONG}$"):
        anyio.run(signing.sign_in, "ada", token, "192.0.2.1", "")
    assert anyio.run(signing.sign_in, "", token, "192.0.2.1", "").name == "program"


def test_guesses_take_no_more_than_two_cores_and_the_others_are_told_to_come_again() -> None:
    running, most, gate, lock = [0], [0], threading.Event(), threading.Lock()
    both = threading.Barrier(2)

    class Slow(Fixed):
        def named(self, name: str) -> User | None:
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            assert gate.wait(20)
            both.wait(20)  # breaks where they come one by one
            with lock:
                running[0] -= 1
            return self.users["ada"]

    signing, statuses = Signing(Slow("ada")), list[int]()

    async def one(i: int) -> None:
        try:
            await signing.sign_in(f"name-{i}", "wrong", f"192.0.2.{i}")
        except Refused as refused:
            statuses.append(refused.status)
        if len(statuses) == 5:
            gate.set()  # those who were refused are; now the others go on

    async def all_at_once() -> None:
        async with anyio.create_task_group() as group:
            for i in range(15):
                group.start_soon(one, i)

    anyio.run(all_at_once)
    assert sorted(statuses) == [401] * 10 + [503] * 5
    assert most[0] == 2


def test_a_program_pays_once_for_its_token_and_a_wrong_one_is_counted() -> None:
    now, users = [0.0], OneToken()
    signing = Signing(users, clock=lambda: now[0])
    assert {anyio.run(signing.bearer, users.token, "192.0.2.1").name for _ in range(100)} == {"operator"}
    assert users.token not in repr(signing._known)
    wrong, statuses = users.token[:-1] + "!", []
    for _ in range(12):
        with pytest.raises(Refused) as refused:
            anyio.run(signing.bearer, wrong, "192.0.2.1")
        statuses.append(refused.value.status)
    assert statuses == [401] * 10 + [429] * 2
    assert anyio.run(signing.bearer, users.token, "192.0.2.1").name == "operator"
    for nonsense in ("", "bwt-", "bwt--", "bwt-x-", "x", "bwt-" + "0" * 12 + "-x", "ü"):
        with pytest.raises(Refused) as refused:
            anyio.run(signing.bearer, nonsense, "192.0.2.1")
        assert refused.value.status == 401


def test_a_right_token_signs_in_whatever_others_try_behind_the_same_proxy() -> None:
    users = OneToken()
    signing, wrong = Signing(users, clock=lambda: 0.0), users.token[:-1] + "!"
    assert [tried(signing, "", "bwt-000000000000-x") for _ in range(6)] == [401] * 6  # of nobody
    assert [tried(signing, "", wrong) for _ in range(6)] == [401] * 4 + [429] * 2  # its own id, and counted as well
    for i in range(40):
        tried(signing, "operator", "wrong", f"192.0.2.{i}")
    assert (
        tried(signing, "operator", PASSWORD)
        == tried(signing, "", "bwt-000000000000-x")
        == tried(signing, "", wrong)
        == 429
    )
    assert tried(signing, "", users.token) == tried(signing, "operator", users.token) == 200
    for _ in range(12):
        with pytest.raises(Refused):
            anyio.run(signing.bearer, wrong, "192.0.2.1")
    assert anyio.run(signing.bearer, users.token, "192.0.2.1").name == "operator"


def test_buckets_forget_the_oldest_key() -> None:
    buckets = Buckets(1, 10.0)
    assert buckets.take("first", 0.0) == 0
    assert buckets.take("first", 1.0) == pytest.approx(9.0)
    for i in range(20_000):
        buckets.take(i, 1.0)
    assert len(buckets._buckets) <= 10_000
    assert buckets.take("first", 1.0) == 0
    assert buckets.take("first", 0.0) > 0  # a clock that goes back gives nothing


# Secrets --------------------------------------------------------------------------------------------------------------


def test_a_secret_is_kept_by_its_own_salt_as_scrypt() -> None:
    first, second = hashed(PASSWORD, CHEAP), hashed(PASSWORD, CHEAP)
    assert first != second
    assert matches(PASSWORD, first)
    assert not matches(PASSWORD + "x", first)
    kind, cost, salt, value = first.split("$")
    log_n, r, p = map(int, cost.split(":"))
    expected = hashlib.scrypt(PASSWORD.encode(), salt=base64.b64decode(salt), n=2**log_n, r=r, p=p, dklen=32)
    assert (kind, base64.b64decode(value)) == ("scrypt", expected)
    assert 128 * USUAL.r * 2**USUAL.log_n * USUAL.p >= 96 << 20  # what OWASP asks for


@pytest.mark.parametrize(
    "kept",
    [
        "",
        "plain",
        "scrypt$15:8:3$$",
        "scrypt$40:8:3$AAAAAAAAAAA=$" + "A" * 43 + "=",
        "scrypt$a:b:c$x$y",
        "md5$1:1:1$AAAAAAAAAAA=$" + "A" * 43 + "=",
    ],
)
def test_what_is_no_hash_of_ours_is_none(kept: str) -> None:
    assert not is_hash(kept)


def test_a_token_is_long_and_names_itself() -> None:
    token, token_id = make_token()
    assert id_of(token) == token_id
    assert len(token.split("-", 2)[2]) >= 43
    assert make_token() != make_token()


# Sessions -------------------------------------------------------------------------------------------------------------


def test_sessions_end_when_idle_and_after_a_day_of_work() -> None:
    now, users = [0.0], Fixed("ada")
    sessions = Sessions(users, lambda: now[0])
    user = users.users["ada"]
    key = sessions.begin(user)
    now[0] += IDLE_SECONDS - 1
    assert sessions.of(key) is not None
    now[0] += IDLE_SECONDS - 1
    assert sessions.of(key, used=False) is not None  # a page that refreshes itself
    now[0] += 2
    assert sessions.of(key) is None
    assert len(sessions) == 0
    key, begun = sessions.begin(user), now[0]
    while now[0] - begun <= LONGEST_SECONDS:
        assert sessions.of(key) is not None
        now[0] += IDLE_SECONDS / 2
    assert sessions.of(key) is None
    assert sessions.of("") is None


def test_sessions_are_bounded() -> None:
    users = Fixed("ada", "bob")
    sessions = Sessions(users, lambda: 0.0)
    bob = sessions.begin(users.users["bob"])
    keys = [sessions.begin(users.users["ada"]) for _ in range(50)]
    assert len(sessions) == 21
    assert sessions.of(keys[0]) is None
    assert sessions.of(keys[-1]) is not None
    assert sessions.of(bob) is not None


def test_a_session_goes_with_its_user() -> None:
    users = Fixed("ada")
    sessions = Sessions(users)
    key = sessions.begin(users.users["ada"])
    users.users["ada"] = User("ada", "viewer", users.users["ada"].secret)
    assert sessions.of(key) is None
    users.users.clear()
    assert sessions.of(key) is None


# The file -------------------------------------------------------------------------------------------------------------


def test_the_file_is_its_owners_alone_and_keeps_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    old = os.umask(0)
    try:
        token = add(path, "ada", "operator")
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    assert token not in path.read_text()
    assert token.split("-", 2)[2] not in path.read_text()
    again = add(path, "ada", "viewer")
    assert again != token
    assert [(one.name, one.role) for one in read(path)] == [("ada", "viewer")]
    assert [one.name for one in tmp_path.iterdir()] == ["users.json"]
    remove(path, "ada")
    assert read(path) == ()
    with pytest.raises(ConfigurationError, match="no user 'ada'"):
        remove(path, "ada")


def test_users_who_are_added_at_once_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    threads = [threading.Thread(target=add, args=(path, f"user-{i}", "viewer")) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.name for one in read(path)} == {f"user-{i}" for i in range(8)}


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o604, 0o666, 0o777])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "users.json"
    add(path, "ada", "operator")
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        UsersFile(path)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        add(path, "eve", "operator")


def test_a_folder_in_which_everybody_can_replace_the_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    add(folder / "users.json", "ada", "operator")
    folder.chmod(0o777)
    with pytest.raises(ConfigurationError, match="anybody can replace it"):
        read(folder / "users.json")
    folder.chmod(0o1777)
    assert len(read(folder / "users.json")) == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"schema": 2, "users": []}',
        '{"schema": 1, "users": {}, "users": 7}',
        '{"schema": 1, "users": [{"name": "a b", "role": "viewer", "secret": "x"}]}',
        '{"schema": 1, "users": [{"name": "ada", "role": "root", "secret": "x"}]}',
        '{"schema": 1, "users": [{"name": "ada", "role": "viewer", "secret": "in-the-clear-123"}]}',
        '{"schema": 1, "users": [{"name": "ada", "rule": "viewer"}]}',
        "[" * 100_000,
        "\x00\xff",
    ],
)
def test_a_damaged_file_is_refused_and_nothing_of_it_is_shown(tmp_path: Path, content: str) -> None:
    path = tmp_path / "users.json"
    path.write_text(content, encoding="latin-1")
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"users\.json \(users\)") as raised:
        read(path)
    assert "in-the-clear" not in str(raised.value)


def test_the_file_is_read_again_when_it_changes_and_nobody_is_in_while_it_cannot_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, now = tmp_path / "users.json", [0.0]
    add(path, "ada", "operator")
    users = UsersFile(path, lambda: now[0])
    before = path.read_text()
    assert users.named("ada") is not None
    for broken in ("", before[:-40], json.dumps({"schema": 1})):
        path.write_text(broken)
        now[0] += 2
        assert users.named("ada") is None
    path.unlink()
    now[0] += 2
    assert users.named("ada") is None
    assert "nobody can sign in" in caplog.text
    write(path, ())
    add(path, "bob", "viewer")
    now[0] += 2
    assert users.named("bob") is not None
    assert users.named("ada") is None


def test_what_is_no_file_is_refused_and_stops_nobody(tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    os.mkfifo(path, 0o600)
    for given in (path, Path("/dev/zero"), Path("/dev/stdin"), tmp_path):
        with pytest.raises(ConfigurationError, match=r"is not a regular file|can be changed or read|cannot be read"):
            UsersFile(given)
    path.unlink()
    path.touch(0o600)
    os.truncate(path, 1 << 40)
    with pytest.raises(ConfigurationError, match="larger than 1 MiB"):
        UsersFile(path)


def test_a_file_that_becomes_a_pipe_lets_nobody_in_until_it_is_one_again(tmp_path: Path) -> None:
    path, now = tmp_path / "users.json", [0.0]
    add(path, "ada", "operator")
    users = UsersFile(path, lambda: now[0])
    path.rename(tmp_path / "kept")
    os.mkfifo(path, 0o600)
    now[0] += 2
    assert users.named("ada") is None
    (tmp_path / "kept").rename(path)
    now[0] += 2
    assert users.named("ada") is not None


def test_no_request_waits_for_storage_that_hangs_and_nobody_is_in_meanwhile(tmp_path: Path) -> None:
    path, now, gate = tmp_path / "users.json", [0.0], threading.Event()
    add(path, "ada", "operator")
    users = UsersFile(path, lambda: now[0])

    class Hanging(type(path)):  # type: ignore[misc]
        """A path on a file system that does not answer."""

        def stat(self, **_: object) -> os.stat_result:
            gate.wait(20)
            raise OSError("gone")

    users._path = Hanging(path)
    with users:
        for second in range(30):
            now[0] = float(second)
            assert (users.named("ada") is not None) == (second < 15)
        gate.set()
    gate.clear()
    with pytest.raises(ConfigurationError, match=r"could not be read within 0\.1 s: look at its storage"):
        UsersFile(Hanging(path), seconds=0.1)
    gate.set()


def test_a_link_is_followed_where_nobody_else_can_replace_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "mounted").mkdir()
    add(tmp_path / "mounted" / "users", "ada", "operator")
    (tmp_path / "users.json").symlink_to("mounted/users")
    assert [one.name for one in read(tmp_path / "users.json")] == ["ada"]
    (tmp_path / "mounted").chmod(0o777)
    with pytest.raises(ConfigurationError, match="anybody can replace it"):
        read(tmp_path / "users.json")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read(tmp_path / "loop")


@pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 65, "ada\n", "../x", "<b>"])
def test_what_cannot_be_a_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be a name"):
        add(tmp_path / "users.json", name, "viewer")
