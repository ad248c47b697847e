"""A store killed, damaged, attacked and shared by many: small counts in the tests, large ones in the benchmark.

Every function works in an empty folder and returns what it counted; nothing but ``tried`` may be above zero where a name
says that something went wrong.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kv_rag.document import Compression
from kv_rag.errors import DamagedState, KVRagError, StateMissing, UnknownDocument
from kv_rag.store import LocalStore
from kv_rag.store.format import _header_content
from kv_rag.store.seal import NO_KEY
from tests.store.random_states import FINGERPRINT, document, header_of, same, state

FULL = Compression.full()
KEY = b"sixteen bytes or more"


# --- kill -9 ---


def kills(folder: Path, rounds: int, *, evicting: bool = False, seed: int = 0) -> Counter[str]:
    """Kills a process that stores (and removes or evicts) states at a random moment, then looks at what is left."""
    chance = random.Random(seed)
    found: Counter[str] = Counter()
    number = 0
    for turn in range(rounds):
        place = folder / str(turn // 20)
        if turn % 20 == 0:
            number, done, gone = 0, list[int](), set[int]()
        budget = 6 * _file_bytes(folder / "measure") + 100 if evicting else None  # longer numbers make longer texts
        lines = _killed_child(place, number, budget, chance)
        for word, at in lines:
            number = max(number, at + 1)
            if word == "done":
                done.append(at)
            else:  # "removing": whether it was is not known
                gone.add(at)
        found["tried"] += 1
        found["stored"] += sum(word == "done" for word, _ in lines)
        _look(place, budget, done, gone, found)
    return found


def _file_bytes(folder: Path) -> int:
    with closing(LocalStore(folder, FINGERPRINT)) as store:
        return store.put(document(0), state(document(0))).file_bytes


def _killed_child(place: Path, first: int, budget: int | None, chance: random.Random) -> list[tuple[str, int]]:
    def work(tell: Callable[[str], None]) -> None:
        store = LocalStore(place, FINGERPRINT, disk_budget=budget)
        for number in range(first, first + 10_000):
            store.put(document(number), state(document(number)))
            tell(f"done {number}")
            if budget is None and number % 3 == 2:
                tell(f"removing {number - 1}")
                store.remove(document(number - 1).id)

    child, pipe = forked(work)
    time.sleep(chance.uniform(0.0, 0.15))
    os.kill(child, signal.SIGKILL)
    told = _read_all(pipe)
    os.waitpid(child, 0)
    words = [line.split() for line in told.decode().split("\n")[:-1]]
    return [(word, int(number)) for word, number in words]


def _look(place: Path, budget: int | None, done: list[int], gone: set[int], found: Counter[str]) -> None:
    try:
        store = LocalStore(place, FINGERPRINT, disk_budget=budget)
    except KVRagError:
        found["stores that did not open"] += 1
        return
    with closing(store):
        found["problems that verify found"] += len(store.verify())
        found["left over"] += len(store._folder.leftovers())
        must = set(done) - gone
        if budget is not None:  # the newest stay: all that fit, less the one that was being written
            must = set(done[-(budget // _file_bytes(place.parent / "measure") - 1) :])
            found["over budget"] += store.nbytes_on_disk() > budget + 200_000  # the index beside it
            found["over budget"] += sum(path.stat().st_size for path in store._folder.state_files()) > budget
        for number in set(done) | gone:
            try:
                found["wrong"] += not same(store.get(document(number).id, FULL), state(document(number)))
            except StateMissing:
                found["lost"] += number in must
            except KVRagError:
                found["unreadable"] += 1


# --- flipped bytes ---


def flips(folder: Path, positions: int, *, hmac_key: bytes | None = None, seed: int = 0) -> Counter[str]:
    """Changes one byte, in every region of a state's file, and asks for the state."""
    chance = random.Random(seed)
    with closing(LocalStore(folder, FINGERPRINT, hmac_key=hmac_key)) as store:
        path = store.put(document(), state(document())).path
    whole = path.read_bytes()
    found: Counter[str] = Counter()
    for name, at in _spread(path, positions, chance):
        changed = bytearray(whole)
        changed[at] ^= chance.randrange(1, 256)
        path.write_bytes(changed)
        found["tried"] += 1
        found[f"tried in {name}"] += 1
        with closing(LocalStore(folder, FINGERPRINT, hmac_key=hmac_key)) as store:
            try:
                store.get(document().id, FULL)
                found["not detected"] += 1
            except DamagedState as error:
                found["file not named"] += path.name not in str(error)
    path.write_bytes(whole)
    return found


def _spread(path: Path, positions: int, chance: random.Random) -> Iterator[tuple[str, int]]:
    """Region and position, every region in turn: a small one is not missed among large ones."""
    header, begin = header_of(path)
    end = len(path.read_bytes()[:begin].rstrip(b" "))
    regions = {"length": (0, 8), "header": (8, end), "padding": (end, begin)}
    for name, entry in header.items():
        if name != "__metadata__":
            regions[name.split(".")[-1]] = tuple(begin + offset for offset in entry["data_offsets"])
    full = [(name, place) for name, place in regions.items() if place[0] < place[1]]
    for turn in range(positions):
        name, place = full[turn % len(full)]
        yield name, chance.randrange(*place)


# --- hostile files ---


def hostile(folder: Path, files: int, *, hmac_key: bytes | None = None, seed: int = 0) -> Counter[str]:
    """Puts a malformed file in a state's place, asks for the state, verifies, and builds the index anew."""
    chance = random.Random(seed)
    found: Counter[str] = Counter()
    with closing(LocalStore(folder, FINGERPRINT, hmac_key=hmac_key)) as store:
        path = store.put(document(), state(document())).path
    outside = folder.parent / "outside.safetensors"
    good = path.read_bytes()
    outside.write_bytes(good)
    if _refused(folder, hmac_key) or _problems(folder, hmac_key):
        raise AssertionError("a good file is refused: nothing can be learned from bad ones")
    before = _most_memory()
    for turn in range(files):
        kind, make = _ATTACKS[turn % len(_ATTACKS)]
        _clear(path)
        path.write_bytes(good)
        with closing(LocalStore(folder, FINGERPRINT, hmac_key=hmac_key)) as store:
            store.put(document(), state(document()))  # the index knows it again
        _clear(path)
        make(path, good, chance, outside)
        if turn // len(_ATTACKS) % 3 == 2:
            (folder / "index.sqlite").unlink(missing_ok=True)
        found["tried"] += 1
        started = time.monotonic()
        try:
            found[f"accepted: {kind}"] += not _refused(folder, hmac_key)
            found[f"passed by verify: {kind}"] += not _problems(folder, hmac_key) and os.path.lexists(path)
        except Exception as error:  # what is no error of ours is a finding
            found[f"crashed: {kind}: {type(error).__name__}: {error}"] += 1
        found["slow"] += time.monotonic() - started > 5
        for odd in path.parent.iterdir():
            _clear(odd)
    found["outside touched"] += outside.read_bytes() != good
    found["memory spike"] += _most_memory() - before > 200 << 20
    return found


def _refused(folder: Path, hmac_key: bytes | None) -> bool:
    with closing(LocalStore(folder, FINGERPRINT, hmac_key=hmac_key)) as store:
        try:
            store.get(document().id, FULL)
            return False
        except KVRagError:
            return True


def _problems(folder: Path, hmac_key: bytes | None) -> int:
    with closing(LocalStore(folder, FINGERPRINT, hmac_key=hmac_key)) as store:
        return len(store.verify())


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _parts(good: bytes) -> tuple[dict, bytes]:
    length = struct.unpack("<Q", good[:8])[0]
    return json.loads(good[8 : 8 + length]), good[8 + length :]


def _joined(header: dict | list | str, tensors: bytes, length: int | None = None) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text) if length is None else length) + text + tensors


def _sealed(header: dict, tensors: bytes) -> bytes:
    """With a checksum that fits, as anybody can make it who has no key."""
    codes = {"F32": torch.float32, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}
    metadata = {name: value for name, value in header["__metadata__"].items() if name != "header_checksum"}
    views = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            part = bytearray(tensors[begin:end])
            views[name] = torch.frombuffer(part, dtype=codes[entry["dtype"]]) if part else torch.empty(0)
            views[name] = views[name].reshape(entry["shape"])
    checksums = json.dumps(NO_KEY.tensors(views), separators=(",", ":"))
    metadata |= {"integrity": "crc32", "checksums": checksums}
    header["__metadata__"] = metadata | {"header_checksum": NO_KEY.header(_header_content(metadata, views))}
    return _joined(header, tensors)


Attack = Callable[[Path, bytes, random.Random, Path], object]


def _truncated(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    path.write_bytes(good[: chance.randrange(len(good))])


def _longer(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    path.write_bytes(good + chance.randbytes(chance.randrange(1, 100)))


def _noise(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    path.write_bytes(chance.randbytes(chance.randrange(5000)))


def _giant_header(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    header, tensors = _parts(good)
    path.write_bytes(_joined(header, tensors, chance.choice([2**63, 2**64 - 1, 1 << 40, 100 << 20, len(good), 0])))


def _many_tensors(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    header, tensors = _parts(good)
    for number in range(chance.choice([1, 100, 20_000])):
        header[f"x{number}"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    path.write_bytes(_joined(header, tensors))


def _nested(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    header, tensors = _parts(good)
    depth = chance.choice([100, 5000, 200_000])
    name = chance.choice(["lengths", "compression", "checksums", "name", "fingerprint"])
    header["__metadata__"][name] = "[" * depth + "]" * depth
    broken = [_joined(header, tensors), _joined("{" * depth, tensors)]
    if name != "checksums":  # to seal a header is to write them anew
        broken.append(_sealed(header, tensors))
    path.write_bytes(chance.choice(broken))


def _shapes(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    header, tensors = _parts(good)
    name = chance.choice([name for name in header if name != "__metadata__"])
    header[name]["shape"] = chance.choice(
        [[-1, 8], [2**62, 2**62], [1 << 40, 8], [], [7], [0], [2**64], [1.5], ["8"], None, [[8]], [8] * 1000]
    )
    path.write_bytes(_joined(header, tensors))


def _offsets(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    header, tensors = _parts(good)
    name = chance.choice([name for name in header if name != "__metadata__"])
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = chance.choice(
        [[-8, end], [begin, -1], [end, begin], [begin + 8, end + 8], [0, 2**63], [2**64, 2**65], [begin], [], None, "0"]
    )
    path.write_bytes(_joined(header, tensors))


def _swapped(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    header, tensors = _parts(good)
    one, other = "layers.000.keys", chance.choice(["layers.000.values", "layers.001.keys"])
    header[one]["data_offsets"], header[other]["data_offsets"] = header[other]["data_offsets"], header[one]["data_offsets"]
    path.write_bytes(_joined(header, tensors))


def _metadata(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    header, tensors = _parts(good)
    name = chance.choice([name for name in header["__metadata__"] if name != "header_checksum"])
    value = chance.choice(["", "null", "-1", "9" * 5000, "[[]]", "NaN", "../../x", "\ud800", '{"a":1}', None, 5, []])
    if chance.random() < 0.2:
        del header["__metadata__"][name]
    elif header["__metadata__"][name] == value:
        header["__metadata__"][name] = "other"
    else:
        header["__metadata__"][name] = value
    path.write_bytes(_joined(header, tensors))


_NONSENSE = [
    ("tokens", "-1"), ("tokens", "9" * 5000), ("tokens", "1e9"), ("characters", "7"), ("name", "[]"),
    ("lengths", "[[12,-12],[12,12]]"), ("lengths", "[[24,0],[12,12]]"), ("lengths", "[]"), ("lengths", "[[1e999]]"),
    ("lengths", "{}"), ("lengths", "[[true]]"), ("document_id", "../../../etc/passwd"), ("document_id", "0" * 32),
    ("compression", "{}"), ("compression", "[]"), ("created", "yesterday"), ("dtype", "float64"), ("dtype", "../x"),
    ("compression", '{"method":5,"keep":1.0,"budget":null,"settings":{}}'),
    ("compression", '{"method":"knorm","keep":NaN,"budget":null,"settings":{}}'),
    ("compression", '{"method":"full","keep":1.0,"budget":null,"settings":{},"stored_dtype":"int8"}'),
    ("fingerprint", "[]"), ("fingerprint", '{"weights":1}'), ("fingerprint", '{"weights":"other"}'),
    ("format", "kv_rag state 99"), ("integrity", "none"),
]  # fmt: skip


def _sealed_metadata(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    """Everything fits but one value of the metadata, which makes no sense."""
    header, tensors = _parts(good)
    name, value = chance.choice(_NONSENSE)
    header["__metadata__"][name] = value
    content = _sealed(header, tensors)
    if name in ("integrity",):
        content = content.replace(b'"integrity": "crc32"', b'"integrity": "none!"')
    path.write_bytes(content)


def _sealed_tensors(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    """Checksums fit, but positions point outside the document, or the text or the tokens are another document's."""
    header, tensors = _parts(good)
    name = chance.choice(["layers.000.positions", "layers.001.positions", "token_ids", "text"])
    begin = header[name]["data_offsets"][0]
    bad = bytearray(tensors)
    code = "<q" if name == "token_ids" else "<B" if name == "text" else "<i"
    value = {"token_ids": 2**62, "text": 255}.get(name, chance.choice([-1, 2**31 - 1, 12, -(2**31)]))
    bad[begin : begin + struct.calcsize(code)] = struct.pack(code, value)
    path.write_bytes(_sealed(header, bytes(bad)))


def _link(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    path.symlink_to(chance.choice([outside, Path("/dev/zero"), Path("/etc/passwd"), path, Path("../../../x")]))


def _no_file(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    chance.choice([lambda: os.mkfifo(path), path.mkdir])()


def _hostile_index(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    """A row whose key leads out of the folder: nothing there may be read, and nothing removed."""
    path.write_bytes(good[:50])
    key = chance.choice(["../../../outside", "/etc/passwd", "..", "", "x" * 10_000, "\x00"])
    with closing(sqlite3.connect(path.parents[2] / "index.sqlite")) as index:
        if index.execute("SELECT name FROM sqlite_master WHERE name = 'states'").fetchone():
            index.execute("UPDATE states SET key = ?", (key,))
            index.commit()


def _hostile_schema(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    """An index that never ends answering."""
    path.write_bytes(good[:50])
    index_path = path.parents[2] / "index.sqlite"
    index_path.unlink(missing_ok=True)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x"
    with closing(sqlite3.connect(index_path)) as index:
        index.execute(f"CREATE VIEW states AS {endless} AS key FROM n")
        index.execute(f"CREATE VIEW documents AS {endless} AS id FROM n")
        index.execute(f"PRAGMA user_version = {chance.randrange(4)}")
        index.commit()


def _odd_names(path: Path, good: bytes, chance: random.Random, outside: Path) -> None:
    name = chance.choice([f"..{path.name}", path.name.upper(), "x" * 200 + ".safetensors", "\udcff.safetensors", "a\nb"])
    (path.parent / name).write_bytes(good)


_ATTACKS: list[tuple[str, Attack]] = [
    (make.__name__.strip("_"), make)
    for make in (
        _truncated, _longer, _noise, _giant_header, _many_tensors, _nested, _shapes, _offsets, _swapped, _metadata,
        _sealed_metadata, _sealed_tensors, _link, _no_file, _hostile_index, _hostile_schema, _odd_names,
    )
]  # fmt: skip


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- many processes ---


def crowd(folder: Path, processes: int, documents: int, *, seed: int = 0) -> Counter[str]:
    """Processes that store, read and remove on one folder, half of the documents the same for all of them."""
    children = [forked(_member(folder, member, documents, seed)) for member in range(processes)]
    found: Counter[str] = Counter()
    for child, pipe in children:
        found.update(json.loads(_read_all(pipe) or '{"processes that ended early": 1}'))
        os.waitpid(child, 0)
    with closing(LocalStore(folder, FINGERPRINT)) as store:
        found["problems that verify found"] += len(store.verify())
        found["left over"] += len(store._folder.leftovers())
        files = sorted(store._folder.state_files())
        found["rows without a file or files without a row"] += files != sorted(r.path for r in store._index.every_state())
        for member in range(processes):
            for turn in range(documents):
                number = _number(member, turn)
                try:
                    found["mixed"] += not same(store.get(document(number).id, FULL), state(document(number)))
                    found["removed but there"] += turn % 2 == 1 and turn % 10 == 5
                except (StateMissing, UnknownDocument):
                    found["lost"] += turn % 2 == 1 and turn % 10 != 5
    return found


def _number(member: int, turn: int) -> int:
    """Even turns are of documents that all processes store."""
    return turn if turn % 2 == 0 else 10_000 * (member + 1) + turn


def _member(folder: Path, member: int, documents: int, seed: int) -> Callable[[Callable[[str], None]], None]:
    def work(tell: Callable[[str], None]) -> None:
        chance = random.Random(1000 * seed + member)
        found: Counter[str] = Counter()
        store = LocalStore(folder, FINGERPRINT)
        for turn in range(documents):
            number = _number(member, turn)
            store.put(document(number), state(document(number)))
            found["tried"] += 1
            other = _number(member, chance.randrange(turn + 1))
            try:
                found["mixed"] += not same(store.get(document(other).id, FULL), state(document(other)))
                found["read"] += 1
            except StateMissing:
                found["read while removed"] += 1
            if turn % 10 in (4, 5):  # 4: of all, others may be reading it; 5: its own
                try:
                    store.remove(document(number).id)
                    found["removed"] += 1
                except (StateMissing, UnknownDocument):
                    found["removed by another"] += 1
        store.close()
        tell(json.dumps(found))

    return work


# --- a full disk ---


@contextmanager
def small_disk(folder: Path, size: str = "2m") -> Iterator[Path | None]:
    """A file system in memory; None where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def full_disk(folder: Path) -> Counter[str]:
    """Stores states until the disk (which should be a small one) is full; everything stored before has to stay."""
    found: Counter[str] = Counter()
    done = []
    with closing(LocalStore(folder, FINGERPRINT)) as store:
        for number in range(100_000):
            try:
                store.put(document(number), state(document(number), tokens=200))
            except KVRagError:
                found["refused"] += 1
                if found["refused"] == 5:
                    break
                continue
            done.append(number)
        found["tried"] = len(done) + found["refused"]
    with closing(LocalStore(folder, FINGERPRINT)) as store:
        found["left over"] += len(store._folder.leftovers())
        for number in done:
            try:
                found["wrong"] += not same(store.get(document(number).id, FULL), state(document(number), tokens=200))
            except KVRagError:
                found["lost"] += 1
        found["not indexed or half-written"] += len(store.verify())
    return found


# --- processes ---


@contextmanager
def closing(thing) -> Iterator:
    try:
        yield thing
    finally:
        thing.close()


def forked(work: Callable[[Callable[[str], None]], None]) -> tuple[int, int]:
    """Runs ``work`` in a copy of this process; what it tells comes line by line from the pipe."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    status = 1
    try:
        os.close(reading)
        torch.set_num_threads(1)
        work(lambda line: os.write(writing, line.encode() + b"\n"))
        status = 0
    finally:
        os._exit(status)


def _read_all(pipe: int) -> bytes:
    with os.fdopen(pipe, "rb") as file:
        return file.read()
