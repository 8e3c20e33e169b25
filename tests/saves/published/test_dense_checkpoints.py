"""Checkpoints of training from the tiers: the same bits afterwards, elsewhere, and in plain torch; nothing is lost."""

import errno
import os

import pytest
import torch

import vbrt
from tests.training.full.full_models import Tiny, batches, resident, train_on
from vbrt.errors import CheckpointError, TierError
from vbrt.saves.checkpoint.training_checkpoint import CHECKPOINT
from vbrt.saves.files.nested_tensors import taken_apart, together


def model():
    torch.manual_seed(0)
    return Tiny(tied=True)


def adamw(parameters) -> torch.optim.Optimizer:
    parameters = list(parameters)
    groups = [{"params": parameters[:3], "weight_decay": 0.2}, {"params": parameters[3:]}]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


def wrapped(training=None, **tiers):
    made = model()
    return vbrt.wrap(made, "full", optimizer=adamw(made.parameters()), tiers=tiers, training=training or {})


def assert_same_state(state, other):
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert torch.equal(value, other[name]), name


def test_a_run_goes_on_with_the_same_bits_under_other_tiers(tmp_path):
    data = batches(5)
    with wrapped() as vb, wrapped(ssd={"enabled": True, "path": str(tmp_path / "pages")}) as other:
        train_on(data[:3], vb, vb.optimizer)
        vb.optimizer.param_groups[0]["lr"] = 5e-3
        vb.save_checkpoint(tmp_path / "run", extra={"random": torch.get_rng_state(), "epoch": (3, float("inf"))})
        expected = train_on(data[3:], vb, vb.optimizer)
        train_on(data[:1], other, other.optimizer)  # it had other moments before
        extra = other.load_checkpoint(tmp_path / "run")
        assert torch.equal(extra["random"], torch.get_rng_state())
        assert extra["epoch"] == (3, float("inf"))
        assert train_on(data[3:], other, other.optimizer) == expected
        assert_same_state(other.state_dict(), vb.state_dict())
        assert other.optimizer.param_groups[0]["lr"] == 5e-3


def test_plain_torch_goes_on_from_it(tmp_path):
    data = batches(5)
    with wrapped() as vb:
        train_on(data[:3], vb, vb.optimizer)
        vb.save_checkpoint(tmp_path)
        expected = train_on(data[3:], vb, vb.optimizer)
        saved = vbrt.read_checkpoint(tmp_path)
        plain = resident(model())
        plain.load_state_dict(saved.model)
        optimizer = adamw(plain.parameters())
        optimizer.load_state_dict(saved.optimizer)
        assert train_on(data[3:], plain, optimizer) == expected
        assert_same_state(plain.state_dict(), vb.state_dict())


def test_masters_of_a_model_in_bf16_are_whole_in_it(tmp_path):
    data, made, other = batches(4), model().bfloat16(), model().bfloat16()
    vb = vbrt.wrap(made, "full", optimizer=adamw(made.parameters()))
    train_on(data[:2], vb, vb.optimizer)
    vb.save_checkpoint(tmp_path)
    saved = vbrt.read_checkpoint(tmp_path)
    with vbrt.wrap(other, "full", optimizer=adamw(other.parameters())) as second:
        second.load_checkpoint(tmp_path)
        assert train_on(data[2:], second, second.optimizer) == train_on(data[2:], vb, vb.optimizer)
        second.load_checkpoint(tmp_path)
        masters = second.unwrap().state_dict()
    assert saved.model["norm.weight"].dtype is torch.float32
    assert_same_state(saved.model, masters)
    vb.close()


def test_moments_of_8_bits_come_back_as_they_were(tmp_path):
    data, training = batches(4), {"moments": "8bit"}
    with wrapped(training) as vb, wrapped(training) as other:
        train_on(data[:2], vb, vb.optimizer)
        vb.save_checkpoint(tmp_path)
        other.load_checkpoint(tmp_path)
        assert train_on(data[2:], other, other.optimizer) == train_on(data[2:], vb, vb.optimizer)
        assert_same_state(other.state_dict(), vb.state_dict())
        resumed = other.optimizer.state_dict()
        other.optimizer.load_state_dict(resumed)
        assert train_on(data, other, other.optimizer) == train_on(data, vb, vb.optimizer)


def test_a_checkpoint_before_the_first_step_starts_over(tmp_path):
    data = batches(2)
    with wrapped() as vb:
        vb.save_checkpoint(tmp_path)
        first = train_on(data, vb, vb.optimizer)
        vb.load_checkpoint(tmp_path)
        assert train_on(data, vb, vb.optimizer) == first


@pytest.mark.parametrize("after", [0, 3, 30])
def test_a_full_disk_leaves_the_checkpoint_before_and_a_model_that_trains(tmp_path, monkeypatch, after):
    data = batches(3)
    with wrapped() as vb:
        train_on(data[:1], vb, vb.optimizer)
        vb.save_checkpoint(tmp_path)
        files, left = sorted(path.name for path in tmp_path.iterdir()), [after]

        write = os.pwrite

        def full(fd, buffer, offset):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(fd, buffer, offset)

        train_on(data[1:2], vb, vb.optimizer)
        with monkeypatch.context() as patch:
            patch.setattr("os.pwrite", full)
            with pytest.raises(CheckpointError, match=r"the disk is full.*intact, and training can continue"):
                vb.save_checkpoint(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == files
        last = train_on(data[2:], vb, vb.optimizer)
        vb.load_checkpoint(tmp_path)
        assert train_on(data[1:], vb, vb.optimizer)[-1:] == last


def test_a_weight_that_cannot_be_read_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    def failing(self):
        raise TierError(f"{self.name}: its page cannot be read")

    with wrapped() as vb:
        vb.save_checkpoint(tmp_path, extra=1)
        files = sorted(path.name for path in tmp_path.iterdir())
        with monkeypatch.context() as patch, pytest.raises(TierError, match="cannot be read"):
            patch.setattr("vbrt.training.full.full_weight.FullWeight.master", failing)
            vb.save_checkpoint(tmp_path, extra=2)
        assert sorted(path.name for path in tmp_path.iterdir()) == files
        assert vb.load_checkpoint(tmp_path) == 1


def test_damage_is_refused_with_the_place(tmp_path):
    with wrapped() as vb:
        vb.save_checkpoint(tmp_path)
        file = next(tmp_path.glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{file.name}: damaged: the bytes of .* do not match"):
            vb.load_checkpoint(tmp_path)
        (tmp_path / CHECKPOINT).write_text((tmp_path / CHECKPOINT).read_text().replace("weight_decay", "weight_decoy"))
        with pytest.raises(CheckpointError, match="digest"):
            vbrt.read_checkpoint(tmp_path)
        with pytest.raises(CheckpointError, match="no such file"):
            vb.load_checkpoint(tmp_path / "elsewhere")


def test_a_checkpoint_of_another_training_changes_nothing(tmp_path):
    with wrapped() as vb:
        vb.save_checkpoint(tmp_path)
    other = Tiny(5)
    with vbrt.wrap(other, "full", optimizer=torch.optim.AdamW(other.parameters())) as vb:
        before = vb.state_dict()
        with pytest.raises(CheckpointError, match=r"layers\.4\.weight is only in the model; nothing was loaded"):
            vb.load_checkpoint(tmp_path)
        assert_same_state(vb.state_dict(), before)
    other = model()
    with vbrt.wrap(other, "full", optimizer=torch.optim.SGD(other.parameters(), 0.1)) as vb:
        with pytest.raises(CheckpointError, match="its optimizer is AdamW, this one SGD"):
            vb.load_checkpoint(tmp_path)


def test_what_is_no_plain_data_is_refused_by_its_place(tmp_path):
    with wrapped() as vb, pytest.raises(CheckpointError, match=r"extra\.a\.1: a builtins\.object cannot be saved"):
        vb.save_checkpoint(tmp_path, extra={"a": [1, object()]})
    assert not list(tmp_path.iterdir())


def test_nested_data_comes_back_as_it_was():
    value = {"a": [1, (2.5, None), {"b": True}], 7: float("-inf"), "t": torch.ones(2)}
    tensors = {}
    assert str(together(taken_apart(value, "x", tensors), tensors.__getitem__)) == str(value)
    for wrong in ({"dict": [1]}, {"tensor": 3}, {"a": 1, "b": 2}, {"float": "one"}, [1]):
        with pytest.raises(ValueError, match=r"."):
            together(wrong, tensors.__getitem__)
