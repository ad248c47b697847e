from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kv_rag.cli import StoredDtype
from kv_rag.document import MODEL, STORED_DTYPES, Compression, LayerPairs
from kv_rag.errors import DamagedState, InvalidSetting
from kv_rag.store import LocalStore, quantise
from tests.store.random_states import FINGERPRINT, document, flip, header_of, same, state

QUANTISED = tuple(dtype for dtype in STORED_DTYPES if dtype != MODEL)
FULL, RAGGED, WITH_AN_EMPTY_HEAD, EMPTY = (40, 40), (3, 29), (0, 17), (0, 0)
LENGTHS = (FULL, RAGGED, WITH_AN_EMPTY_HEAD, EMPTY)
HEAD_DIM = 96


def layer(lengths: tuple[int, ...], dtype: torch.dtype = torch.float32, head_dim: int = HEAD_DIM) -> LayerPairs:
    """Keys as models have them: some channels far from zero. Values with a token that is much larger than the rest."""
    seed = torch.Generator().manual_seed(sum(lengths))
    keys, values = (torch.randn(sum(lengths), head_dim, generator=seed) for _ in range(2))
    keys[:, ::7] += 130
    keys[:, 1::11] -= 55
    keys[:, 3] = 2.5  # a channel that is the same everywhere
    values[1:2] *= 40
    positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
    return LayerPairs(keys.to(dtype), values.to(dtype), positions, lengths)


def read_back(pairs: LayerPairs, stored_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    packed = quantise.pack(pairs, stored_dtype)
    return quantise.unpack(packed, stored_dtype, pairs.lengths, pairs.keys.dtype)


def float_error(numbers: torch.Tensor) -> torch.Tensor:
    """What float32 arithmetic itself may be wrong by, a few units in the last place."""
    return 4 * torch.finfo(torch.float32).eps * numbers.abs().amax()


def head_ranges(pairs: LayerPairs) -> torch.Tensor:
    """Largest minus least key of the head and channel that each key belongs to: ``[N, D]``."""
    heads = [head for head in pairs.keys.split(list(pairs.lengths)) if head.shape[0]]
    return torch.cat([(head.amax(0) - head.amin(0)).expand_as(head) for head in heads])


BF16_STEP = 2.0**-7  # rounding up to bfloat16 makes a number larger by less than this fraction of it


@pytest.mark.parametrize("stored_dtype", ["int8", "int4"])
@pytest.mark.parametrize("lengths", [FULL, RAGGED, WITH_AN_EMPTY_HEAD])
def test_a_key_comes_back_within_half_a_step_of_its_heads_channel(lengths, stored_dtype):
    pairs = layer(lengths)
    keys, _ = read_back(pairs, stored_dtype)
    half_step = head_ranges(pairs) / 255 / 2 * (1 + BF16_STEP)
    assert ((keys - pairs.keys).abs() <= half_step + float_error(pairs.keys)).all()


@pytest.mark.parametrize(("stored_dtype", "levels", "group"), [("int8", 255, HEAD_DIM), ("int4", 15, 48)])
@pytest.mark.parametrize("lengths", [FULL, RAGGED, WITH_AN_EMPTY_HEAD])
def test_a_value_comes_back_within_half_a_step_of_its_tokens_group(lengths, stored_dtype, levels, group):
    pairs = layer(lengths)
    _, values = read_back(pairs, stored_dtype)
    grouped = pairs.values.unflatten(-1, (-1, group))
    low = grouped.amin(-1) - BF16_STEP * grouped.amin(-1).abs()  # rounded down to bfloat16 at most so far
    half_step = (grouped.amax(-1) - low) / levels / 2 * (1 + BF16_STEP)
    error = (values - pairs.values).abs().unflatten(-1, (-1, group))
    assert (error <= half_step[..., None] + float_error(pairs.values)).all()


@pytest.mark.parametrize("lengths", [FULL, RAGGED, WITH_AN_EMPTY_HEAD])
def test_fp8_is_wrong_by_a_sixteenth_of_the_distance_from_the_middle_at_most(lengths):
    pairs = layer(lengths)
    keys, values = read_back(pairs, "fp8")
    low, high = quantise.channel_ranges(pairs.keys, lengths)
    around = (pairs.keys - quantise.per_row(low + (high - low) / 2, lengths)).abs()
    # below 2**-6 of the scale e4m3 has a fixed step of 2**-9
    smallest = head_ranges(pairs) / 2 / 448 * 2.0**-10 * (1 + BF16_STEP)
    assert ((keys - pairs.keys).abs() <= around / 16 + smallest + float_error(pairs.keys)).all()
    smallest = pairs.values.abs().amax(-1, keepdim=True) / 448 * 2.0**-10 * (1 + BF16_STEP)
    assert ((values - pairs.values).abs() <= pairs.values.abs() / 16 + smallest + float_error(pairs.values)).all()


def test_bfloat16_is_what_torch_rounds_to():
    pairs = layer(RAGGED)
    keys, values = read_back(pairs, "bfloat16")
    assert keys.equal(pairs.keys.bfloat16().float()) and values.equal(pairs.values.bfloat16().float())


@pytest.mark.parametrize("stored_dtype", ["int8", "int4", "fp8"])
def test_a_channel_with_one_number_keeps_it_exactly(stored_dtype):
    keys, _ = read_back(layer(RAGGED), stored_dtype)
    assert (keys[:, 3] == 2.5).all()


@pytest.mark.parametrize("stored_dtype", QUANTISED)
def test_zeros_stay_zeros(stored_dtype):
    pairs = replace(layer(RAGGED), keys=torch.zeros(32, HEAD_DIM), values=torch.zeros(32, HEAD_DIM))
    keys, values = read_back(pairs, stored_dtype)
    assert not keys.any() and not values.any()


@pytest.mark.parametrize("stored_dtype", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_what_is_read_back_has_the_models_dtype_and_shape(lengths, dtype, stored_dtype):
    pairs = layer(lengths, dtype)
    keys, values = read_back(pairs, stored_dtype)
    assert (keys.dtype, values.dtype, keys.shape, values.shape) == (dtype, dtype, pairs.keys.shape, pairs.values.shape)


@pytest.mark.parametrize("stored_dtype", STORED_DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("head_dim", [8, 64, 96])
def test_packed_tensors_have_the_shapes_that_readers_expect(head_dim, lengths, stored_dtype):
    packed = quantise.pack(layer(lengths, head_dim=head_dim), stored_dtype)
    expected = quantise.shapes(stored_dtype, lengths, head_dim, torch.float32)
    assert {name: (tuple(part.shape), part.dtype) for name, part in packed.items()} == expected


# bytes a pair (keys and values, their scales) and bytes a head (its channels' ranges), head_dim 64
@pytest.mark.parametrize(
    ("stored_dtype", "per_pair", "per_head"),
    [("model", 512, 0), ("bfloat16", 256, 0), ("int8", 128 + 4, 64 * 6), ("int4", 96 + 4, 64 * 6), ("fp8", 128 + 2, 64 * 6)],
)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_bytes_are_as_many_as_the_format_says(lengths, stored_dtype, per_pair, per_head):
    packed = quantise.pack(layer(lengths, head_dim=64), stored_dtype)
    heads = sum(length > 0 for length in lengths)
    assert sum(part.numel() * part.element_size() for part in packed.values()) == sum(lengths) * per_pair + heads * per_head


def test_nibbles_come_back():
    codes = torch.arange(256, dtype=torch.uint8).reshape(4, 64) % 16
    assert quantise.unpack_nibbles(quantise.pack_nibbles(codes)).equal(codes)


def test_rounding_outward_is_the_nearest_bfloat16_on_that_side():
    seed = torch.Generator().manual_seed(1)
    numbers = torch.randn(10_000, generator=seed) * 10 ** torch.randint(-30, 30, (10_000,), generator=seed)
    down, up = quantise.rounded_down(numbers), quantise.rounded_up(numbers.abs())
    assert (down.float() <= numbers).all() and (up.float() >= numbers.abs()).all()
    nearest = numbers.bfloat16().float()
    assert down[nearest <= numbers].float().equal(nearest[nearest <= numbers])
    assert up[nearest.abs() >= numbers.abs()].float().equal(nearest[nearest.abs() >= numbers.abs()].abs())


@pytest.mark.parametrize("stored_dtype", QUANTISED)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -2e38])
def test_numbers_that_have_no_code_are_refused(stored_dtype, wrong):
    pairs = layer(RAGGED)
    pairs.values[5, 5] = wrong
    with pytest.raises(InvalidSetting, match="use stored_dtype='model'"):
        quantise.pack(pairs, stored_dtype)


def test_a_head_dim_that_would_misalign_the_file_is_refused():
    with pytest.raises(InvalidSetting, match="multiple of 8, this model's is 12"):
        quantise.pack(layer(RAGGED, head_dim=12), "int8")


# --- in the store ---


def stored_as(folder: Path, stored_dtype: str, dtype: torch.dtype = torch.float32, lengths=((5, 0), (12, 1))):
    of = document()
    made = state(of, dtype=dtype, lengths=lengths)
    made = replace(made, compression=replace(made.compression, stored_dtype=stored_dtype))
    record = LocalStore(folder, FINGERPRINT).put(of, made)
    return made, record


@pytest.mark.parametrize("stored_dtype", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ragged_state_is_loaded_as_its_layers_unpack(tmp_path, dtype, stored_dtype):
    made, _ = stored_as(tmp_path / "kv", stored_dtype, dtype)
    expected = replace(
        made,
        layers=tuple(
            replace(pairs, keys=keys, values=values)
            for pairs, (keys, values) in ((pairs, read_back(pairs, stored_dtype)) for pairs in made.layers)
        ),
    )
    assert same(LocalStore(tmp_path / "kv", FINGERPRINT).get(made.document_id, made.compression), expected)


@pytest.mark.parametrize("stored_dtype", STORED_DTYPES)
def test_records_count_the_state_in_memory_and_the_file_on_disk(tmp_path, stored_dtype):
    made, record = stored_as(tmp_path / "kv", stored_dtype)
    store = LocalStore(tmp_path / "kv", FINGERPRINT)
    loaded = store.get(made.document_id, made.compression)
    assert record.nbytes == sum(pairs.nbytes for pairs in loaded.layers) == sum(pairs.nbytes for pairs in made.layers)
    header, beginning = header_of(record.path)
    tensors = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    assert record.file_bytes == beginning + max(end for _, end in tensors.values()) == record.path.stat().st_size
    written = sum(end - begin for name, (begin, end) in tensors.items() if ".keys" in name or ".values" in name)
    expected = [quantise.shapes(stored_dtype, pairs.lengths, 8, torch.float32).values() for pairs in made.layers]
    assert written == sum(torch.Size(shape).numel() * dtype.itemsize for layer in expected for shape, dtype in layer)


def test_an_index_rebuilt_from_the_files_counts_the_same(tmp_path):
    _, record = stored_as(tmp_path / "kv", "int4")
    (tmp_path / "kv" / "index.sqlite").unlink()
    assert LocalStore(tmp_path / "kv", FINGERPRINT).states(record.document_id) == [record]


def test_the_same_document_in_another_dtype_is_another_state(tmp_path):
    paths = {stored_as(tmp_path / "kv", stored_dtype)[1].path for stored_dtype in STORED_DTYPES}
    states = LocalStore(tmp_path / "kv", FINGERPRINT).states(document().id)
    assert len(paths) == 5 and [record.compression.stored_dtype for record in states] == list(STORED_DTYPES)


@pytest.mark.parametrize("stored_dtype", QUANTISED)
def test_a_flipped_bit_of_a_quantised_state_is_found(tmp_path, stored_dtype):
    made, record = stored_as(tmp_path / "kv", stored_dtype)
    header, beginning = header_of(record.path)
    for name, entry in header.items():
        if name.startswith("layers.001"):
            path = LocalStore(tmp_path / name, FINGERPRINT).put(document(), made).path
            flip(path, beginning + entry["data_offsets"][0])
            with pytest.raises(DamagedState, match=name):
                LocalStore(tmp_path / name, FINGERPRINT).get(made.document_id, made.compression)


def test_an_unknown_stored_dtype_is_refused_with_the_list_of_known_ones():
    with pytest.raises(InvalidSetting, match="model, bfloat16, int8, int4, fp8, got 'int3'"):
        Compression.of("knorm", keep=0.5, stored_dtype="int3")


def test_states_in_the_models_dtype_are_spelled_as_before_there_were_others():
    assert str(Compression.full()) == "full" and str(Compression.full("int8")) == "full int8"
    assert str(Compression.of("knorm", keep=0.5, stored_dtype="int4")) == "knorm keep=0.5 int4"


def test_the_command_line_offers_the_same_dtypes():
    assert tuple(choice.value for choice in StoredDtype) == STORED_DTYPES


# --- in the engine ---

TEXT = "The crane in the north yard needs oil of grade forty six, and it is greased on Mondays. " * 4


@pytest.mark.parametrize("stored_dtype", QUANTISED)
@pytest.mark.parametrize("mode", ["compressed", "full", "snapkv"])
def test_an_answer_right_after_ingesting_equals_one_after_a_restart(make_engine, mode, stored_dtype):
    first = make_engine()
    [entry] = first.ingest(TEXT, keep=0.5, allocation="heads", stored_dtype=stored_dtype)
    ask = {"documents": entry.id, "mode": mode}
    before = first.likelihood("Which oil?", "forty six", **ask).nll
    assert make_engine().likelihood("Which oil?", "forty six", **ask).nll == before


@pytest.mark.parametrize(("stored_dtype", "share"), [("bfloat16", 0.5), ("int8", 0.3), ("fp8", 0.3), ("int4", 0.25)])
def test_disk_bytes_shrink_and_bytes_in_memory_do_not(make_engine, stored_dtype, share):
    plain, small = make_engine(folder="plain"), make_engine(folder="small")
    [entry] = plain.ingest(TEXT * 4, retain="full")
    small.ingest(TEXT * 4, retain="full", stored_dtype=stored_dtype)
    for engine in (plain, small):
        engine.likelihood("Which oil?", "forty six", documents=entry.id, mode="full")
    assert small.memory().bytes_on_disk < (share + 0.08) * plain.memory().bytes_on_disk
    assert small.memory().resident_bytes == plain.memory().resident_bytes > 0


def test_questions_use_the_newest_state_that_fits(make_engine):
    engine = make_engine()
    [entry] = engine.ingest(TEXT, retain="full")
    ask = {"documents": entry.id, "mode": "full"}
    exact = engine.likelihood("Which oil?", "forty six", **ask).nll
    assert engine.ingest(TEXT, retain="full", stored_dtype="int4")[0].new
    assert engine.likelihood("Which oil?", "forty six", **ask).nll != exact


def test_the_models_own_dtype_by_name_is_no_second_state(make_engine):
    engine = make_engine(dtype=torch.bfloat16)
    engine.ingest(TEXT, retain="full")
    assert not engine.ingest(TEXT, retain="full", stored_dtype="bfloat16")[0].new
