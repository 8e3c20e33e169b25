"""Output heads stay dense: found where models say what theirs is, and never more than a head."""

import pytest
import torch
from torch import nn

import vbrt
from tests.models import config, gpt2, llama
from vbrt.config import load_config

BERT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
VIT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 16,
}
WAV2VEC2 = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_feat_extract_layers": 2,
    "classifier_proj_size": 16,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
T5 = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
XLNET = {"vocab_size": 128, "d_model": 64, "n_layer": 4, "n_head": 4, "d_inner": 256}
BART = {
    "vocab_size": 128,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
}
LLAMA = {**BERT, "num_key_value_heads": 2}

# (class, its sizes, the layers that stay dense)
TASKS = [
    ("BertForSequenceClassification", BERT, {"classifier"}),
    ("BertForTokenClassification", BERT, {"classifier"}),
    ("BertForQuestionAnswering", BERT, {"qa_outputs"}),
    ("BertForMultipleChoice", BERT, {"classifier"}),
    ("BertForNextSentencePrediction", BERT, {"cls.seq_relationship"}),
    ("BertForPreTraining", BERT, {"cls.seq_relationship", "cls.predictions.decoder"}),
    ("RobertaForSequenceClassification", BERT, {"classifier.dense", "classifier.out_proj"}),
    ("LlamaForSequenceClassification", LLAMA, {"score"}),
    ("LlamaForTokenClassification", LLAMA, {"score"}),
    ("LlamaForQuestionAnswering", LLAMA, {"qa_outputs"}),
    ("BartForSequenceClassification", BART, {"classification_head.dense", "classification_head.out_proj"}),
    ("T5ForTokenClassification", T5, {"classifier"}),
    ("T5ForQuestionAnswering", T5, {"qa_outputs"}),
    ("XLNetForSequenceClassification", XLNET, {"sequence_summary.summary", "logits_proj"}),
    ("ViTForImageClassification", VIT, {"classifier"}),
    ("Wav2Vec2ForSequenceClassification", WAV2VEC2, {"projector", "classifier"}),
    ("Wav2Vec2ForCTC", {**WAV2VEC2, "vocab_size": 32}, {"lm_head"}),
]


def made(name, sizes):
    import transformers

    cls = getattr(transformers, name)
    with torch.device("meta"):
        return cls(cls.config_class(**sizes, num_labels=5)).eval()


def plan_of(model, **weights):
    return vbrt.make_plan(model, load_config(config("nvfp4", **weights)))


def kept_as_heads(model):
    return {name: skip.reason for name, skip in plan_of(model).skipped.items() if "keep_head" in skip.reason}


@pytest.mark.parametrize(("name", "sizes", "heads"), TASKS, ids=[name for name, *_ in TASKS])
def test_the_head_of_a_model_for_a_task_stays_dense(name, sizes, heads):
    model = made(name, sizes)
    kept = kept_as_heads(model)
    tied = {name for name, skip in plan_of(model).skipped.items() if "shares storage" in skip.reason}
    assert kept.keys() == heads - tied
    assert all("keep_head = false swaps it" in reason for reason in kept.values())
    swapped = {alias for swap in plan_of(model, keep_head=False).swaps for alias in (swap.name, *swap.aliases)}
    assert heads - tied <= swapped


def test_the_reason_says_how_the_head_was_found():
    reasons = kept_as_heads(made("XLNetForSequenceClassification", XLNET))
    assert "head of XLNetForSequenceClassification, outside its base model (transformer)" in reasons["logits_proj"]


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_language_model_keeps_its_output_embeddings_and_no_more(make):
    assert set(kept_as_heads(make())) <= {"lm_head"}


def test_what_is_more_than_a_head_is_swapped_but_for_its_last_layer():
    model = made("ViTForImageClassification", VIT)
    model.neck = nn.Sequential(*[nn.Linear(64, 64, device="meta") for _ in range(8)])
    assert set(kept_as_heads(model)) == {"classifier"}


def test_a_decoder_for_pretraining_is_no_head():
    sizes = {
        **VIT,
        "decoder_hidden_size": 64,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 96,
    }
    assert not kept_as_heads(made("ViTMAEForPreTraining", sizes))


class Classified(nn.Module):
    """timm's way to say what the head is; what is called `fc1` is none."""

    def __init__(self, heads):
        super().__init__()
        self.fc1, self.head, self.head_dist = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)
        self.get = heads

    def get_classifier(self):
        return self.get(self)


@pytest.mark.parametrize(
    ("get", "heads"),
    [
        (lambda m: m.head, {"head"}),
        (lambda m: (m.head, m.head_dist), {"head", "head_dist"}),
        (lambda m: nn.Identity(), set()),
    ],
)
def test_timm_says_what_its_classifier_is(get, heads):
    kept = kept_as_heads(Classified(get))
    assert kept.keys() == heads and all("Classified.get_classifier()" in reason for reason in kept.values())


@pytest.mark.parametrize(
    ("name", "kept"),
    [("score", True), ("classifier", True), ("qa_outputs", True), ("v_head", True), ("projection", False)],
)
def test_where_a_model_says_nothing_names_decide(name, kept):
    model = nn.ModuleDict({"up": nn.Linear(64, 64), name: nn.Linear(64, 64)})
    assert set(kept_as_heads(model)) == ({name} if kept else set())
    layers = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({name: nn.Linear(64, 64)})])})
    assert not kept_as_heads(layers)  # one in each layer is none


def test_a_head_that_peft_copies_for_training_trains():
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=32, pad_token_id=0)).eval()
    vb = vbrt.wrap(model, config("nvfp4"))
    peft = get_peft_model(vb, LoraConfig(r=4, target_modules=["q_proj"], task_type=TaskType.SEQ_CLS))
    trained = {name: p for name, p in peft.named_parameters() if p.requires_grad and "score" in name}
    before = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=0.1)
    peft(torch.arange(3, 15).reshape(1, 12)).logits.square().sum().backward()
    optimizer.step()
    assert trained and all(not torch.equal(p, before[name]) for name, p in trained.items())
