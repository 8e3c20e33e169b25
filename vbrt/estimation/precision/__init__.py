"""Precision by layer: `vbrt.choose_precision`, and `weights.calibrate`.

A model, a byte budget and calibration text enter. Each layer's loss in 4 and in 8 bits is measured on the model's own
logits while its weights stream, a knapsack spends the budget, and a `Precision` leaves, which a config takes.

**Choice.** One weight at a time is replaced by what its format gives back: only `.data` changes, and the original
tensor is put back in a `finally`, so that mapped weights are never written to. The KL of the outputs to the model's own
is the layer's loss. Such losses nearly add up (.00694 against .00727 on the committed model), so the least sum within
the budget is a knapsack, solved exactly over the layers' few sizes. Two choices whose sums are closer than that are
told apart by measuring the model as a whole, once as chosen and once as the diagonal Hessian would choose, on the same
sequences: at 15 % more bytes the sums were .2 % apart and in the wrong order, and steps by loss a byte had left 1.7 %
on the evaluated text. Weights are held twice meanwhile, so models that pass through a GPU go by the sums, as does
`Precision.within`, which spends another budget on the same measurements. The Hessian takes one run and was nearly as
good up to a third of the weights; the squared error of weights alone was no better than random below that, and is not
offered. `"auto"` is settled in `wrap`, before the plan; the planner refuses it, so no path without weights guesses. A
model in host memory runs on the GPU that will compute (`streamed_forward.py`): as many weights there as the budget
holds, the others while their module runs.

**Calibration.** The model runs once on a text, before anything is encoded, with each module's tensors on the computing
device while its forward runs. Which input meets which weight is seen in the dispatcher, by the address of the weight
among the operands of a product, so one mechanism serves linear layers, Conv1D and every loop over experts
(`input_statistics.py`). A plan's swap carries what was found to the encoder. Two uses. *Scales*: the search weighs a
weight's squared error by the mean square of its input; .00929 to .00889 on one text of the committed model, .00570 to
.00583 on the other, so by itself hardly worth a run. *Codes*: GPTQ's error feedback under these scales
(`vbrt.formats.error_feedback`); .00673 and .00512. Whole matrices instead of groups of 256 columns gain little more on
this model, whose layers are 256 or 1,024 wide. `exact` weights get scales only, since a fine plane that restores
weights from codes that are not the nearest is larger; experts too, since their moments would take more memory than they
do.

At the bytes of nvfp4 and 10, 25, 50 % more, layers in nvfp4, `mxint8` and `exact` have KLs of .0070, .0045 and .0017,
calibrated of .0049, .0031 and .0012. Without 8 bits these were .0089, .0074 and .0054: exact pages take three times the
bytes of nvfp4, so that half as many bytes again made a quarter of the weights exact, where 8 bits reach 60 %. Up to
there no layer is worth being exact. Several 4-bit formats as candidates gain another tenth (docs/accuracy.md,
`scripts/precision.py`).
"""

__all__: list[str] = []
