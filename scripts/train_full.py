"""scripts/train with --vb-full: weights, gradients and optimizer state in the tiers, and checkpoints of them."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import vbrt
from scripts.train_files import Checkpoint
from vbrt import CheckpointError
from vbrt.saves.checkpoint.training_checkpoint import CHECKPOINT, SavedCheckpoint

__all__ = ["FOLDER", "FullCheckpoint", "checkpoint_in", "wrapped"]

FOLDER = "checkpoint"  # of a run's folder


def wrapped(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, *, checkpointing: bool
) -> vbrt.VBFullWrapper:
    """Return the model in the tiers, computed on a device; `checkpointing`: inputs of its blocks wait on the host."""
    tiers = {"gpu": {"enabled": False}} if device.type == "cpu" else {}
    activations = ("offload" if device.type != "cpu" else "recompute") if checkpointing else "keep"
    return vbrt.wrap(model, "full", optimizer=optimizer, tiers=tiers, training={"activations": activations})


class FullCheckpoint:
    """A checkpoint of a run with --vb-full, as `Checkpoint` is of others; its tensors are not yet read.

    Raises:
        CheckpointError: missing, damaged, or not of scripts/train.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: dict[str, Any] = SavedCheckpoint(path).state["extra"]
        if not isinstance(self.state, dict) or "config" not in self.state:
            raise CheckpointError(f"{path}: not a checkpoint of scripts/train; remove it, or train into another --out")

    def damaged(self, what: object) -> CheckpointError:
        """Return the error that says so."""
        return CheckpointError(f"{self.path}: damaged: {what}; remove it to start over")


def checkpoint_in(out: Path) -> Checkpoint | FullCheckpoint | None:
    """Return the checkpoint of a run's folder, or None. Raises CheckpointError: it is damaged."""
    if (out / FOLDER / CHECKPOINT).exists():
        return FullCheckpoint(out / FOLDER)
    path = out / "checkpoint.safetensors"
    return Checkpoint(path) if path.exists() else None
