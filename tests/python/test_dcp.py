"""Directories of torch.distributed.checkpoint are read bit for bit, and every defect is one sentence that names it."""

import io
import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata

import dcp_checkpoints as saved
from fsdp_cpp import Error
from fsdp_cpp.convert import dcp


pytestmark = saved.ONE_RANK


def placed_bytes(checkpoint, key):
    """The tensor as the bytes at place_of() say, which is how C++ reads it."""
    tensor = checkpoint.tensors[key]
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype)
    for chunk in tensor.chunks:
        place = dcp.place_of(checkpoint, key, chunk)
        with open(place.file, "rb") as file:
            data = torch.frombuffer(bytearray(file.read()[place.begin:]), dtype=torch.uint8)
        data = data[:data.numel() // tensor.dtype.itemsize * tensor.dtype.itemsize].clone().view(tensor.dtype)
        whole[tuple(slice(b, b + n) for b, n in zip(chunk.offsets, chunk.sizes))] = data.as_strided(chunk.sizes, place.strides)
    return whole


def expect_all(directory, expected):
    checkpoint = dcp.read_metadata(str(directory))
    for key, value in expected.items():
        for read in (dcp.read_tensor(checkpoint, key), placed_bytes(checkpoint, key)):
            assert read.dtype == value.dtype and torch.equal(read, value), key
    return checkpoint


@pytest.fixture
def one(tmp_path):
    """A checkpoint of one process, to be broken."""
    saved.save({"model": {"weight": torch.arange(12.).view(4, 3), "bias": torch.ones(4)}, "note": "text"}, tmp_path / "one")
    return tmp_path / "one"


def expect_error(directory, *words):
    with pytest.raises(Error) as caught:
        checkpoint = dcp.read_metadata(str(directory))
        for key, tensor in checkpoint.tensors.items():
            for chunk in tensor.chunks:
                dcp.place_of(checkpoint, key, chunk)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return str(caught.value)


def test_a_checkpoint_of_one_process_is_read_bit_for_bit(tmp_path):
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
             torch.float8_e4m3fn)
    whole = {str(each): (torch.randn(3, 5) * 9).to(each) for each in types}
    state = {**whole, "rows": torch.randn(6, 4).t(), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4),
             "grad": torch.nn.Parameter(torch.ones(2))}
    saved.save({"nested": state, "number": 7}, tmp_path / "c")
    checkpoint = expect_all(tmp_path / "c", {f"nested.{key}": value.detach() for key, value in state.items()})
    assert dcp.read_object(checkpoint, "number") == 7
    assert checkpoint.paths["nested.rows"] == ("nested", "rows")


def test_uneven_shards_of_fsdp2_are_read_bit_for_bit():
    directory, expected = saved.saved_on_ranks(saved.fsdp2_run)
    moments = {key for key in expected if key.endswith((".exp_avg", ".exp_avg_sq"))}
    named = {(f"optimizer.state.{key}" if key in moments else f"model.{key}"): value for key, value in expected.items()}
    checkpoint = expect_all(directory, named)
    sizes = {chunk.sizes for chunk in checkpoint.tensors["model.0.weight"].chunks}
    assert len(sizes) > 1, "no uneven shards: the test proves nothing"
    assert len(checkpoint.tensors["model.3.weight"].chunks) < saved.RANKS, "no empty shard: the test proves nothing"


def test_columns_replicas_and_scalars_are_read_bit_for_bit():
    checkpoint = expect_all(*saved.saved_on_ranks(saved.placed_tensors))
    assert len(checkpoint.tensors["columns"].chunks) == 3


def replace_stream(directory, key, value):
    """Puts torch.save(value) in the place of a tensor's stream, in a file of its own."""
    stream = io.BytesIO()
    torch.save(value, stream)
    (directory / "other.distcp").write_bytes(stream.getvalue())

    def change(metadata):
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
        info.relative_path, info.offset, info.length = "other.distcp", 0, len(stream.getvalue())
    saved.edit_metadata(directory, change)


def test_a_stream_may_hold_a_part_of_a_larger_storage(one):
    value = torch.randn(9, 9)[2:6, 3:9:2]
    replace_stream(one, "model.weight", value)
    expect_all(one, {"model.weight": value})


def test_any_number_of_boxes_that_cover_a_tensor_is_fine():
    cover = dcp._cover_fault
    assert cover([((0, 0), (4, 3))], (4, 3)) is None
    assert cover([((), ())], ()) is None
    # A range of rows that begins and ends in mid-row, between two others.
    middle = [((1, 2), (1, 1)), ((2, 0), (1, 3)), ((3, 0), (1, 1))]
    around = [((0, 0), (1, 3)), ((1, 0), (1, 2)), ((3, 1), (1, 2))]
    assert cover(middle + around, (4, 3)) is None
    assert cover(middle + around[:2], (4, 3)) == ("missing", ((3, 4), (1, 3)))
    assert cover(middle + around + [((2, 1), (1, 1))], (4, 3)) == ("stored twice", ((2, 3), (1, 2)))
    assert cover([], (4,)) == ("missing", ((0, 4),))
    rows = [((i, 0), (1, 8)) for i in range(3000)]
    assert cover(rows, (3000, 8)) is None
    assert cover(rows[:1500] + rows[1501:], (3000, 8)) == ("missing", ((1500, 1501), (0, 8)))


# --- defects of files ------------------------------------------------------------------------------------------------------


def test_a_metadata_that_is_missing_or_no_pickle_is_named(one, tmp_path):
    expect_error(tmp_path, ".metadata is missing", "did not finish")
    for text in (b"", b"hello", (one / ".metadata").read_bytes()[:-9]):
        (one / ".metadata").write_bytes(text)
        expect_error(one, ".metadata: this is no pickle of DCP's metadata")
    (one / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    expect_error(one, NO_METADATA)


def test_a_cut_or_missing_file_is_named_with_its_bytes(one):
    whole = (one / "__0_0.distcp").read_bytes()
    (one / "__0_0.distcp").write_bytes(whole[:-1])
    expect_error(one, "__0_0.distcp", f"has {len(whole) - 1} bytes", f"need {len(whole)}", "cut off")
    (one / "__0_0.distcp").unlink()
    expect_error(one, "__0_0.distcp is missing")


def test_overwritten_bytes_of_a_stream_are_an_error_that_names_file_and_tensor(one):
    path, begin, length = saved.stream_of(one, "model.weight")
    data = bytearray(path.read_bytes())
    data[begin:begin + length] = bytes(length)
    path.write_bytes(data)
    expect_error(one, "__0_0.distcp", "'model.weight'", f"at byte {begin}")


# --- defects of the metadata -----------------------------------------------------------------------------------------------


def weight_of(metadata):
    return metadata.state_dict_metadata["model.weight"]


def first_stream(metadata):
    return next(iter(metadata.storage_data.values()))


def overlap(metadata):
    entry = weight_of(metadata)
    index, info = next((i, info) for i, info in metadata.storage_data.items() if i.fqn == "model.weight")
    entry.chunks.append(type(entry.chunks[0])(torch.Size([2, 1]), torch.Size([1, 2])))
    metadata.storage_data[type(index)(index.fqn, torch.Size([2, 1]))] = info


def drop_bias(metadata):
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != "model.bias"}


def turn(metadata):
    entry = weight_of(metadata)
    entry.size = entry.chunks[0].sizes = torch.Size([3, 4])


NO_METADATA = "this is no metadata of torch.distributed.checkpoint"
DEFECTS = {
    "gap": (lambda m: setattr(weight_of(m), "size", torch.Size([6, 3])), ["'model.weight' [6, 3]", "elements [4:6, 0:3] are missing"]),
    "overlap": (overlap, ["'model.weight' [4, 3]", "elements [2:3, 1:3] are stored twice"]),
    "outside": (lambda m: setattr(weight_of(m), "size", torch.Size([3, 3])),
                ["'model.weight'", "[4, 3] at [0, 0] is outside of the shape [3, 3]"]),
    "no file": (drop_bias, ["'model.bias'", "no file for the chunk at [0]"]),
    "type": (lambda m: setattr(weight_of(m).properties, "dtype", torch.float16),
             ["'model.weight' at [0, 0] is torch.float32 [4, 3]", "metadata says torch.float16 [4, 3]"]),
    "shape": (turn, ["is torch.float32 [4, 3]", "metadata says torch.float32 [3, 4]"]),
    "extension": (lambda m: setattr(first_stream(m), "transform_descriptors", ["zstd"]), ["zstd", "without extensions"]),
    **{path: (lambda m, path=path: setattr(first_stream(m), "relative_path", path), [path, "outside of the checkpoint's directory"])
       for path in ("../other.distcp", "/etc/passwd", "a/../../b")},
    **{f"{field} {value!r}": (lambda m, field=field, value=value: setattr(first_stream(m), field, value), [NO_METADATA])
       for field, value in (("offset", -1), ("length", "9"), ("offset", 1.5), ("length", True))},
}


@pytest.mark.parametrize("change,words", DEFECTS.values(), ids=DEFECTS)
def test_a_defect_of_the_metadata_is_named(one, change, words):
    saved.edit_metadata(one, change)
    expect_error(one, *words)


# --- pickles that do more than describe ------------------------------------------------------------------------------------


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_a_pickle_that_calls_something_is_refused_and_not_run(one, tmp_path):
    def change(metadata):
        metadata.planner_data = {"x": Evil(tmp_path / "was-run")}
    saved.edit_metadata(one, change)
    expect_error(one, f"asks for {os.mkdir.__module__}.mkdir", "nothing of it was run")
    assert not (tmp_path / "was-run").exists()
    pickle.loads((one / ".metadata").read_bytes())
    assert (tmp_path / "was-run").exists(), "the pickle is harmless: the test proves nothing"


class Attribute:
    """Pickled as getattr(owner, name), as enums of Python 3.11.0 to 3.11.3 are."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_memory_formats_may_be_written_as_attributes_and_nothing_else_may(one):
    formats = dcp_metadata._MEM_FORMAT_ENCODING

    def add(attribute):
        def change(metadata):
            metadata.planner_data = {"x": attribute}
        return change

    saved.edit_metadata(one, add(Attribute(formats, "TORCH_CONTIGUOUS_FORMAT")))
    dcp.read_metadata(str(one))
    saved.edit_metadata(one, add(Attribute(dcp_metadata.Metadata, "__init__")))
    expect_error(one, "asks for the attribute '__init__' of something that is no memory format")


@pytest.mark.parametrize("module,name", [
    ("os", "system"), ("builtins", "eval"), ("torch", "load"), ("torch", "_utils"),
    ("torch", "hub.load"), ("torch.serialization", "load"), ("fractions", "Fraction"),
    ("torch.distributed.checkpoint.metadata", "torch"), ("torch.distributed.checkpoint.filesystem", "FileSystemReader")])
def test_classes_that_are_not_dcps_metadata_are_named(one, module, name):
    (one / ".metadata").write_bytes(b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) +
                                    name.encode() + b"\x93.")
    expect_error(one, f"asks for {module}.{name}, which is no class of DCP's metadata")


def test_a_pickle_cannot_change_what_later_ones_are_read_with(one):
    before = (one / ".metadata").read_bytes()
    # BUILD on the class itself: sets Metadata.storage_data for all that come later.
    (one / ".metadata").write_bytes(b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
                                    b"N}\x8c\x0cstorage_data}s\x86b.")
    expect_error(one, ".metadata")
    (one / ".metadata").write_bytes(before)
    expect_all(one, {"model.bias": torch.ones(4)})


def test_a_tensor_stream_that_calls_something_is_refused_and_not_run(one, tmp_path):
    replace_stream(one, "model.weight", Evil(tmp_path / "was-run"))
    expect_error(one, "other.distcp: 'model.weight' at byte 0 cannot be read")
    assert not (tmp_path / "was-run").exists()


def test_a_stream_that_holds_no_tensor_is_named(one):
    replace_stream(one, "model.weight", [1, 2])
    expect_error(one, "other.distcp: the chunk of 'model.weight' at [0, 0] is list")
