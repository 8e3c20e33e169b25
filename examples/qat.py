# %% [markdown]
# # Training through 4 bits
#
# The optimizer trains the dense weights, each forward sees them in 4 bits. The planes that are saved at the end are
# those that the forward computed with. A real model takes many more steps: docs/accuracy.md has one.

# %%
import tempfile

import small
import torch

import vbrt

model = small.language_model(torch.float32)
held_out = torch.stack([row["input_ids"] for row in small.rows(4, 128, start=4_000)])


@torch.no_grad()
def loss_of(model) -> float:
    """Return the mean loss a byte on text that no step here has seen."""
    ids = held_out.to(model.device)
    return model(input_ids=ids, labels=ids).loss.item()


print(f"dense, before: {loss_of(model):.4f}")

# %%
vb = vbrt.wrap(model, "train", weights={"format": "mxfp4"})  # "nvfp4" is the default, and loses less
print(f"in 4 bits, before: {loss_of(vb):.4f}")
optimizer = torch.optim.AdamW(vb.parameters(), lr=2e-5)
for step, row in enumerate(small.rows(24, 128)):
    ids = row["input_ids"][None].to(vb.device)
    loss = vb(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 8 == 7:
        print(f"step {step + 1}: {loss.item():.4f}")
trained = loss_of(vb)
print(f"in 4 bits, after 24 steps: {trained:.4f}")

# %% [markdown]
# Save the planes, and run them: the loss is that of the training forward.

# %%
folder = tempfile.mkdtemp()
vb.save(folder)
vb.close()
again = vbrt.load(folder, small.language_model(torch.float32))
print(f"loaded: {loss_of(again):.4f}")
assert abs(loss_of(again) - trained) < 1e-3
again.close()
