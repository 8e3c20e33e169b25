"""`vbrt serve`: what OpenAI's client gets, alone and with others, and what it is refused."""

import concurrent.futures
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from tests.cli.cases import errors
from vbrt.cli import main as cli

transformers = pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
PROMPTS = [f"{'the sea ' * (number % 5)}{number}" for number in range(20)]


@pytest.fixture(scope="module")
def talking(llama, tmp_path_factory) -> Path:
    """The tiny Llama with a chat template, in float32: bfloat16 rounds otherwise in a batch, and has ties."""
    directory = tmp_path_factory.mktemp("served") / "tiny"
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


class Served:
    """A `vbrt serve` of its own process, which runs `code` first, and a client of it."""

    def __init__(self, model: Path, log: Path, *options: str, code: str = "", port: int = 0) -> None:
        self.log = log
        start = f"import sys\n{code}\nfrom vbrt.cli.main import main\nsys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", start, "serve", str(model), "--port", str(port), *options]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        while "Application startup complete" not in self.said():
            assert self.process.poll() is None, self.said()
            time.sleep(0.05)
        self.url = self.said().partition(" at ")[2].partition("/v1,")[0]
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def said(self) -> str:
        return self.log.read_text()

    def ask(self, text: str, **how):
        messages = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(model="tiny", messages=messages, **{"max_tokens": 6} | how)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=20) as reply:
            return reply.read().decode()

    def healthy_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                return json.loads(self.get("/health")) == {"status": "ok"}
            except OSError:
                time.sleep(0.05)
        return False

    def end(self, how: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(how)
        return self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def served(talking, tmp_path_factory):
    served = Served(talking, tmp_path_factory.mktemp("log") / "log", "--config", "exact", "--context", "200")
    yield served
    assert served.end() == 0, served.said()
    assert "Traceback" not in served.said(), served.said()
    assert served.said().rstrip().endswith("vbrt: stopped: the server has ended")


@pytest.fixture(scope="module")
def wanted(talking) -> dict[str, str]:
    """Greedy answers of the dense model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(talking)
    tokenizer = transformers.AutoTokenizer.from_pretrained(talking)
    found = {}
    for text in PROMPTS:
        inputs = tokenizer(f"<user>{text}<assistant>", return_tensors="pt", return_token_type_ids=False)
        out = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        found[text] = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def test_twenty_users_at_once_get_the_dense_models_answers(served, wanted):
    with concurrent.futures.ThreadPoolExecutor(20) as users:
        replies = list(users.map(served.ask, PROMPTS))
    assert [reply.choices[0].message.content for reply in replies] == [wanted[text] for text in PROMPTS]
    assert {reply.choices[0].finish_reason for reply in replies} == {"length"}
    passes = [line for line in served.get("/metrics").splitlines() if line.startswith("vbrt_passes_total")]
    assert passes and float(passes[0].split()[1]) < 6 * 20 / 2  # they shared passes


def test_a_stream_is_the_same_text_and_one_that_is_left_holds_nobody_up(served, wanted):
    chunks = served.ask(PROMPTS[3], stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == wanted[PROMPTS[3]].rstrip("\ufffd")  # transformers' server keeps half a character back
    left = served.ask("a", stream=True, max_tokens=150)
    next(iter(left))
    left.close()
    assert served.ask(PROMPTS[7]).choices[0].message.content == wanted[PROMPTS[7]]


def test_answers_end_with_the_context_and_longer_prompts_are_refused(served):
    reply = served.ask("b" * 150, max_tokens=1000)
    assert reply.usage.total_tokens == 200 and reply.choices[0].finish_reason == "length"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            served.ask("c" * 300, stream=stream)
        assert re.search(r"the prompt has 3\d\d tokens; this server has room for 200", refused.value.response.text)


def test_only_the_served_model_answers_and_nothing_unloads_it(served, wanted):
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError):
        served.client.chat.completions.create(model="other", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.APIStatusError):
        served.client.chat.completions.create(model="tiny", messages=[], extra_body={"no_such_field": 1})
    urllib.request.urlopen(urllib.request.Request(f"{served.url}/reset", method="POST"), timeout=20).close()
    assert served.ask(PROMPTS[1]).choices[0].message.content == wanted[PROMPTS[1]]
    assert json.loads(served.get("/health")) == {"status": "ok"}


def test_users_share_a_cache_in_8_bits(talking, wanted, tmp_path):
    served = Served(talking, tmp_path / "log", "--config", "exact", "--context", "200", "--kv", "8")
    with concurrent.futures.ThreadPoolExecutor(8) as users:
        replies = [reply.choices[0].message.content for reply in users.map(served.ask, PROMPTS[:8])]
    assert sum(reply == wanted[text] for reply, text in zip(replies, PROMPTS, strict=False)) >= 6  # near ties may turn
    assert served.end() == 0 and "Traceback" not in served.said(), served.said()


@pytest.mark.parametrize("how", ["together", "one by one"])
def test_a_stop_ends_requests_that_would_go_on(talking, wanted, tmp_path, how):
    options = ("--one-by-one",) if how == "one by one" else ("--sequences", "2")
    served = Served(talking, tmp_path / "log", "--name", "tiny", "--config", "dense", *options)
    assert ("temperature" in served.said()) == (how == "together")
    assert served.ask(PROMPTS[2], temperature=0).choices[0].message.content == wanted[PROMPTS[2]]
    with concurrent.futures.ThreadPoolExecutor(2) as users:
        stream = served.ask("a", stream=True, max_tokens=100_000)
        next(iter(stream))
        whole = users.submit(served.ask, "b", max_tokens=100_000)
        begun = time.monotonic()
        assert served.end(signal.SIGTERM) == 0, served.said()
        assert time.monotonic() - begun < 20
        with pytest.raises(openai.APIError, match="error"):
            list(stream)
        assert "stopped before this answer ended" in whole.exception().response.text
    assert whole.exception().status_code == 503
    assert "Traceback" not in served.said(), served.said()


FAILING = """
from pathlib import Path
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor as Processor
from vbrt.libraries import transformers_serving
plain, transformers_serving._POLL_SECONDS = Processor._generation_step, 1.0
def step(processor, model):
    if Path({flag!r}).exists():
        raise AttributeError('no "plane" of this\\nor that')
    plain(processor, model)
Processor._generation_step = step
"""


def test_a_loop_that_fails_is_named_and_begins_anew_and_a_second_time_ends_the_server(talking, wanted, tmp_path):
    flag, said = tmp_path / "fails", "the batch of all requests failed: AttributeError: no 'plane' of this"
    served = Served(talking, tmp_path / "log", "--config", "exact", code=FAILING.format(flag=str(flag)))
    with concurrent.futures.ThreadPoolExecutor(2) as users:
        stream = served.ask("a", stream=True, max_tokens=100_000)
        next(iter(stream))
        whole = users.submit(served.ask, "b", max_tokens=100_000)
        time.sleep(0.2)  # it is in the batch, too
        flag.touch()
        with pytest.raises(openai.APIError) as failed:
            list(stream)
        assert said in failed.value.body
        assert whole.exception().status_code == 503 and said in whole.exception().response.text
    with pytest.raises(openai.InternalServerError, match="503") as refused:
        served.ask("a")
    assert said in refused.value.response.text
    with pytest.raises(urllib.error.HTTPError, match="503"):
        served.get("/health")
    flag.unlink()
    assert served.healthy_within(20), served.said()
    assert f"{said}; all requests got an error, and generation begins anew, with eager decode" in served.said()
    assert served.ask(PROMPTS[3]).choices[0].message.content == wanted[PROMPTS[3]]
    flag.touch()
    with pytest.raises(openai.InternalServerError, match="503"):
        served.ask("a")
    assert served.process.wait(timeout=30) == 2
    assert re.search(f"vbrt: error: {said}, the second time in 60 seconds; the server has ended", served.said())
    assert served.said().count("begins anew") == 1


def test_requests_of_one_id_are_each_answered(served, wanted):
    same = {"extra_headers": {"X-Request-ID": "again"}}
    with concurrent.futures.ThreadPoolExecutor(20) as users:
        replies = list(users.map(lambda text: served.ask(text, **same), PROMPTS))
    assert [reply.choices[0].message.content for reply in replies] == [wanted[text] for text in PROMPTS]


def test_what_cannot_be_served_is_refused_before_the_model_is_loaded(talking, monkeypatch, capsys):
    assert cli.main(["serve", "no-such-model", "--kv", "8", "--one-by-one"]) == 2
    assert "--kv 8 is of the cache that requests share; leave out --one-by-one" in errors(capsys)
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "no-such-model", "--port", str(port)]) == 2
    assert f"--port {port}: localhost cannot be listened at: Address already in use" in errors(capsys)
    assert cli.main(["serve", "no-such-model", "--host", "nowhere.invalid"]) == 2
    assert "--host nowhere.invalid" in errors(capsys)
    from vbrt.libraries import transformers_serving

    monkeypatch.setattr(transformers_serving, "_PACKAGES", ("fastapi", "no_such_package"))
    assert cli.main(["serve", str(talking)]) == 2
    assert "needs no_such_package; pip install 'vbrt[serve]'" in errors(capsys)


BUDGETS = """
import itertools, threading, time
from vbrt.integrations import server
made = server.server_of
def changing(vb, *args, **how):
    def change():
        for count, budget in enumerate(itertools.cycle(("100KB", "1GiB"))):
            time.sleep(0.3)
            try:
                vb.set_budget("cpu", budget)
            except Exception as error:
                count = repr(error)
            with Path({noted!r}).open("a") as file:
                print(count, file=file)
    threading.Thread(target=change, daemon=True).start()
    return made(vb, *args, **how)
server.server_of = changing
"""


class User:
    """Client that asks until it is answered, over one connection as long as that lasts."""

    def __init__(self, port: int, wanted: dict[str, str]) -> None:
        self.port, self.wanted, self.retried, self.link = port, wanted, 0, None

    def answered(self, number: int) -> None:
        """Get the answer of a request. Raises AssertionError: it is not that of this request, or comes too late."""
        text, until = PROMPTS[number % len(PROMPTS)], time.monotonic() + 60
        while time.monotonic() < until:
            try:
                if number % 100 == 7:
                    self._refused(number, text)
                if number % 40 == 3:
                    self._left(number, text)
                if self._got(number, text, stream=number % 10 == 1):
                    return
            except (OSError, http.client.HTTPException):  # the server has died
                self.link = None
            self.retried += 1
            time.sleep(0.1)
        raise AssertionError(f"request {number} is lost")

    def _post(self, number: int, text: str, **how) -> http.client.HTTPResponse:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 6} | how
        self.link = self.link or http.client.HTTPConnection("localhost", self.port, timeout=60)
        headers = {"Content-Type": "application/json", "X-Request-ID": f"r{number}"}
        self.link.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return self.link.getresponse()

    def _refused(self, number: int, text: str) -> None:
        for status, wrong in (
            (400, {"model": "other"}),
            (422, {"no_such": 1}),
            (400, {"messages": [{"role": "user", "content": "c" * 300}]}),
        ):
            reply = self._post(number, text, **wrong)
            assert reply.read() and reply.status in (status, 503)

    def _left(self, number: int, text: str) -> None:
        self._post(number, text, max_tokens=100, stream=True).readline()
        self.link.close()
        self.link = None

    def _got(self, number: int, text: str, *, stream: bool) -> bool:
        reply = self._post(number, text, stream=stream)
        body = reply.read().decode()
        if reply.status == 503 or '{"error": ' in body:
            return False
        assert (reply.status, reply.headers["X-Request-ID"]) == (200, f"r{number}"), body
        if not stream:
            body = json.loads(body)
            assert [choice["message"]["content"] for choice in body["choices"]] == [self.wanted[text]]
            assert body["usage"]["completion_tokens"] == 6
            return True
        chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(c["delta"].get("content") or "" for c in choices) == self.wanted[text].rstrip("\ufffd")
        assert [c["finish_reason"] for c in choices if c.get("finish_reason")] == ["length"]
        return True


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and limits the size of files")
def test_ten_thousand_requests_are_answered_once_each_through_faults(talking, wanted, tmp_path):
    import resource

    count, crowd, flag, noted = 10_000, 12, tmp_path / "fails", tmp_path / "budgets"
    code = FAILING.format(flag=str(flag)) + BUDGETS.format(noted=str(noted))
    options = [
        "--config",
        "exact",
        "--context",
        "200",
        "--set",
        f"tiers.ssd.path={tmp_path}/pages",
        "--set",
        "tiers.ssd.enabled=true",
    ]
    done: list[int] = []

    def started(port: int = 0) -> Served:
        return Served(talking, tmp_path / f"log{len(done)}", *options, code=code, port=port)

    def ask_all(user: User, first: int) -> None:
        for number in range(first, count, crowd):
            user.answered(number)
            done.append(number)

    def wait_for(answers: int) -> None:
        while len(done) < answers and not any(one.done() for one in asking):
            time.sleep(0.02)

    served = started()
    port = int(served.url.rpartition(":")[2])
    users = [User(port, wanted) for _ in range(crowd)]
    with concurrent.futures.ThreadPoolExecutor(crowd) as threads:
        asking = [threads.submit(ask_all, user, first) for first, user in enumerate(users)]
        wait_for(2000)
        served.process.kill()
        assert served.process.wait() == -signal.SIGKILL
        served = started(port)
        wait_for(4000)
        flag.touch()
        while "failed: AttributeError" not in served.said():
            time.sleep(0.01)
        flag.unlink()
        wait_for(5000)
        assert served.end(signal.SIGTERM) == 0, served.said()
        served = started(port)
        wait_for(6000)
        limit = served.log.stat().st_size
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (limit, limit))  # bytes: the drive is full then
        before = resident_bytes(served)
        wait_for(count - 100)
        after = resident_bytes(served)
        for one in asking:
            one.result()
    assert sorted(done) == list(range(count)) and sum(user.retried for user in users) >= 3
    changes = noted.read_text().splitlines()
    print(f"{(after - before) / 2**20:.1f} MiB more, {sum(user.retried for user in users)} tries, {changes[-3:]}")
    assert after - before < 32 << 20
    assert served.end() == 0 and served.log.stat().st_size <= limit
    assert len(changes) > 20 and all(change.isdigit() for change in changes), changes


def resident_bytes(served: Served) -> int:
    import resource

    return int(Path(f"/proc/{served.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()
