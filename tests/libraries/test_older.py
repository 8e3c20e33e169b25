"""An older transformers, installed past the extras' bounds: an error of vbrt that names the version, no traceback."""

import pytest

from tests import forked

pytest.importorskip("transformers")
#: what the code of a user does, and which name is not there
CALLS = {
    "from_pretrained": ("vbrt.from_pretrained(sys.argv[1])", "quantizers.auto", "LOADING_ATTRIBUTES_CONFIG_TYPES"),
    "QuantizationConfig": ("vbrt.QuantizationConfig('fp4')", "core_model_loading", "ConversionOps"),
    "experts": ("vbrt.QuantizationConfig('fp4')", "core_model_loading", "WeightConverter.force_cpu"),
}


@pytest.mark.parametrize(
    "call", ["from_pretrained", *(pytest.param(call, marks=pytest.mark.exhaustive) for call in list(CALLS)[1:])]
)
def test_a_missing_name_is_an_error_that_says_what_it_takes(call, tmp_path):
    line, module, name = CALLS[call]
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    code = f"""
import importlib, sys, vbrt, transformers
for known in [known for known in sys.modules if known.startswith("vbrt.integrations.")]:
    del sys.modules[known]  # it looks for names as it is imported
transformers.PreTrainedModel  # imports what transformers itself needs
owner, _, name = {name!r}.rpartition(".")
module = importlib.import_module("transformers.{module}")
delattr(getattr(module, owner) if owner else module, name)
transformers.__version__ = "5.0.0"
try:
    {line}
except vbrt.VBError as error:
    print(type(error).__name__, error)
"""
    done = forked.run(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (
        f"LibraryError transformers 5.0.0 has no transformers.{module}.{name} (vbrt needs transformers 5.17 or newer)"
        in (done.stdout)
    )


def test_a_newer_one_without_a_name_is_told_what_was_tested(monkeypatch):
    probe = pytest.importorskip("vbrt.libraries.probe")
    monkeypatch.setattr(pytest.importorskip("transformers"), "__version__", "99.0")
    refusal = probe.Feature("transformers", ("utils:no_such_name",), without="").refusal()
    assert (
        "transformers 99.0 has no transformers.utils.no_such_name (vbrt was tested with transformers 5.17 to" in refusal
    )
