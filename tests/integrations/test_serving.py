"""`transformers serve` answers from a directory with planes, as docs/serving.md says."""

import importlib.util
import json
import socket
import time
import urllib.request

import pytest

import vbrt

transformers = pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "openai"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed; pip install 'transformers[serving]'", allow_module_level=True)

from transformers.cli.serve import Serve  # noqa: E402 - needs those

from tests.cli.conftest import llama  # noqa: E402, F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture
def server():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    serve = Serve(port=port, device="cpu", non_blocking=True, log_level="error")
    serve.url = f"http://localhost:{port}"
    for _ in range(200):
        try:
            urllib.request.urlopen(f"{serve.url}/health", timeout=2).close()
            break
        except OSError:
            time.sleep(0.05)
    yield serve
    serve.kill_server()


def answer(server, model, text):
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 6,
        "generation_config": json.dumps({"max_new_tokens": 6, "do_sample": False}),
    }
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())["choices"][0]["message"]["content"]


def test_chat_completions_of_planes_are_those_of_the_dense_model(llama, tmp_path, server):  # noqa: F811
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = TEMPLATE
    inputs = tokenizer("<user>sea<assistant>", return_tensors="pt", return_token_type_ids=False)
    dense = transformers.AutoModelForCausalLM.from_pretrained(llama)
    out = dense.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    expected = tokenizer.decode(out, skip_special_tokens=True)
    config = vbrt.QuantizationConfig("exact", tiers={"gpu": {"enabled": False}})
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, quantization_config=config)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert answer(server, str(tmp_path), "sea") == expected
    (served,) = (vbrt.of(loaded.model) for loaded in server._model_manager.loaded_models.values())
    assert served.stats().passes == 6 and served.lossless
