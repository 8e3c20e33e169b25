"""Mistakes of a user, one a line: a type checker must complain about each line with a comment, and no other."""

import torch

import vbrt

model = torch.nn.Linear(64, 64)
vbrt.wrp(model)  # wrp
vbrt.wrap(model, teirs={"gpu": {"budget": "6GiB"}})  # teirs
vbrt.wrap(model, tiers={"gpo": {"budget": "6GiB"}})  # gpo
vbrt.wrap(model, tiers={"gpu": {"budgett": "6GiB"}})  # budgett
vbrt.wrap(model, mode="inference")  # mode
vbrt.wrap(model).set_budget("gpo", "6GiB")  # gpo
vbrt.from_pretrained("model", weights={"fine": "exakt"})  # exakt
vbrt.QuantizationConfig("exact", compute={"capture": False})  # capture
vbrt.load_config("fp4", polcy={"kind": "lru"})  # polcy
number: int = vbrt.wrap(model).generate(max_new_tokens=8)  # Tensor
