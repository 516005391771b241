"""Fine-tuning beside TRL, with PEFT's adapters: the same ids, learned tokens, losses and gradients.

Adapters of several ranks and scales (rsLoRA), and tables of the vocabulary that are trained whole (`modules_to_save`).
"""

import json
import os
import re
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero
from tests.helpers import trl_losses
from tests.helpers.brought import MODELS, save_folder
from tests.helpers.corpora import make
from tests.helpers.loaders import open_loader
from tests.helpers.trl_losses import as_rows
from tests.helpers.vllm_rules import objections_to_adapters
from zero.base.errors import UserError
from zero.corpus.format.example import PAIR, TEXT
from zero.corpus.preparing.prepare import Corpus
from zero.corpus.text.tokenizers import load_tokenizer
from zero.exchange.architecture_table import architecture_of
from zero.exchange.hub_model import open_hf_model
from zero.exchange.peft_folder import CONFIG_FILE, peft_adapters, read_peft, tensor_name, write_peft
from zero.exchange.warm_start import warm_start
from zero.models.adapters import TABLES, Adapters
from zero.training.batch import UNDIVIDED, Batch, Separators
from zero.training.objectives.dpo import Dpo
from zero.training.objectives.objective import LIKELIHOOD, Objective
from zero.training.parts import StepOptions
from zero.training.programs import Programs, make_programs
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import Tuning

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

# PEFT reads a deprecated property of transformers, and TRL's trainers warn of coming changes.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
CONTEXT = 64
RATE = 1e3  # of gradient descent: the step is the gradient
BETA = 0.3
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]
# TRL's loss, that of zero, the share of wrong preferences, and a stage.
SETTINGS = [("sigmoid", "conservative", 0.0, 3), ("robust", "robust", 0.1, 1), ("aot", "conservative", 0.2, 2)]
CHATS = [
    [{"role": "user", "content": "What is a shard?"}, {"role": "assistant", "content": "A part."}],
    [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "gather?"},
        {"role": "assistant", "content": "scatter"},
        {"role": "user", "content": "zéro?"},
        {"role": "assistant", "content": "stage"},
    ],
    [{"role": "user", "content": "2048"}, {"role": "assistant", "content": "layout"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "漢字 don't"}],
]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": question}],
        "chosen": [{"role": "assistant", "content": better}],
        "rejected": [{"role": "assistant", "content": worse}],
    }
    for question, better, worse in [
        ("What is a shard?", "A part.", "No."),
        ("gather", "scatter", "zéro zéro"),
        ("layout?", "漢字", "2048"),
        ("stage", "a", "user"),
    ]
]

STRINGS = [
    {"prompt": pair["prompt"][0]["content"], **{key: f" {pair[key][0]['content']}" for key in ("chosen", "rejected")}}
    for pair in PAIRS
]
LINES: dict[str, list[dict[str, Any]]] = {
    "chats": [{"messages": chat} for chat in CHATS],
    "completions": [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in STRINGS],
    "answers": [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS],
}


class Home:
    """A folder of a family with adapters of PEFT, and what TRL makes of both."""

    def __init__(self, place: Path, family: str) -> None:
        import peft
        import torch
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

        self.place = place
        self.folder = place / "folder"
        self.adapters = place / "adapters"
        save_folder(self.folder, family)
        self.tokenizer = trl_losses.tokenizer_of(self.folder)
        model = trl_losses.model_of(self.folder)
        is_tied = model.config.tie_word_embeddings
        config = peft.LoraConfig(
            r=3,
            lora_alpha=7,
            target_modules=MODULES,
            rank_pattern={"q_proj": 5, r"layers\.\d+\.mlp\.down_proj": 2},
            alpha_pattern={"v_proj": 11},
            use_rslora=True,
            init_lora_weights=False,
            modules_to_save=["embed_tokens"] if is_tied else ["embed_tokens", "lm_head"],
            ensure_weight_tying=is_tied,
            task_type="CAUSAL_LM",
        )
        torch.manual_seed(0)
        common = trl_losses.arguments(place / "trl", len(CHATS), CONTEXT)
        trainers = cast(Any, DPOTrainer), cast(Any, SFTTrainer)
        self.of_pairs = trainers[0](
            model,
            args=DPOConfig(**common, beta=BETA),
            train_dataset=Dataset.from_list(PAIRS),
            processing_class=self.tokenizer,
            peft_config=config,
        )
        self.model = self.of_pairs.model
        with torch.no_grad():
            for name, x in self.model.named_parameters():
                if "modules_to_save" in name:
                    x.add_(0.1 * torch.randn_like(x))
        self.model.eval()
        # Before the other trainer, which replaces the model's forward pass.
        self.preferences = {setting[:3]: self._pairs(setting[0], setting[2]) for setting in SETTINGS}
        self.of_chats = trainers[1](
            self.model,
            args=SFTConfig(**common, assistant_only_loss=True),
            train_dataset=Dataset.from_list([{"messages": chat} for chat in CHATS]),
            processing_class=self.tokenizer,
        )
        self.model.eval()  # a trainer puts it into its mode of training
        self.model.save_pretrained(str(self.adapters), save_embedding_layers=False)

    def chats(self) -> tuple[Any, float, dict[str, np.ndarray]]:
        """TRL's batch, its loss, and the gradient of each trained tensor by its name in PEFT's files."""
        batch = self.of_chats.data_collator(list(self.of_chats.train_dataset))
        return batch, *self._gradients(lambda: self.of_chats.compute_loss(self.model, dict(batch)))

    def _pairs(self, loss_type: str, label_smoothing: float) -> tuple[Any, float, dict[str, np.ndarray]]:
        """As `chats`, of the pairs; the mean of single pairs, since the loss "aot" sorts those of a batch."""
        trainer = self.of_pairs
        trainer.loss_types = [loss_type]
        trainer.loss_weights = [1.0]
        trainer.label_smoothing = label_smoothing
        collate = trainer.data_collator
        rows = list(trainer.train_dataset)
        losses = lambda: sum(trainer._compute_loss(self.model, collate([row]), False) for row in rows)  # noqa: E731
        return collate(rows), *self._gradients(lambda: losses() / len(rows))

    def _gradients(self, loss_of: Any) -> tuple[float, dict[str, np.ndarray]]:
        self.model.zero_grad()
        loss = loss_of()
        loss.backward()
        found = {}
        for name, x in self.model.named_parameters():
            if x.requires_grad and x.grad is not None:
                found[name.replace(".default", "").replace(".modules_to_save", "")] = x.grad.numpy().copy()
        return loss.item(), found

    @cached_property
    def size(self) -> Any:
        found = open_hf_model(str(self.folder))
        assert found is not None
        return found.size

    def programs(self, objective: Objective, stage: int, rate: float) -> tuple[ShardedGPT, Programs, Any, Any]:
        """Model, programs, base and state of zero on two devices, which descend along the gradient."""
        tuning = Tuning(peft_adapters(self.adapters, self.size))
        model = ShardedGPT(self.size, zero.Axis("zero", (1, 2)), stage, tuning=tuning)
        options = StepOptions(lambda step: jnp.float32(rate), objective=objective)
        programs = make_programs(model, optax.stateless(lambda grads, params: grads), options, jax.devices()[:2])
        base = model.base
        frozen = on_two(base, warm_start(str(self.folder), ShardedGPT(self.size, zero.Axis("zero", (1, 8)), 3)))
        return model, programs, frozen, programs.start(on_two(model, self.read(tuning)))

    def read(self, tuning: Tuning) -> Any:
        return read_peft(self.adapters, ShardedGPT(self.size, zero.Axis("zero", (1, 8)), 3, tuning=tuning))

    def gradients(self, objective: Objective, rows: np.ndarray, stage: int = 3) -> tuple[float, dict[str, np.ndarray]]:
        """Loss and gradients of one step of zero, by the names of PEFT's files."""
        model, programs, frozen, state = self.programs(objective, stage, RATE)
        before = zero.to_host(state.params, model.layout, model.axis)
        rows = rows.reshape(2, -1, rows.shape[-1])
        extra = {"reference": programs.reference(frozen, rows)} if objective.has_reference else {}
        first = np.arange(2, dtype=np.int32) * rows.shape[1]
        state, metrics = programs.step(state, Batch(rows, first, extra), frozen)
        after = zero.to_host(state.params, model.layout, model.axis)
        architecture = architecture_of(self.size)
        found: dict[str, np.ndarray] = {}
        pairs = zip(model.layout.leaves_of(before), model.layout.leaves_of(after), strict=True)
        for leaf, (x, y) in zip(model.layout.leaves, pairs, strict=True):
            gradient = (x.astype(np.float64) - y.astype(np.float64)) / RATE
            name = tensor_name(leaf.name, architecture)
            if leaf.path[0] in TABLES:
                found[name] = architecture.pack(leaf.name, [gradient], self.size)
            else:
                found |= {name.format(layer): own.T for layer, own in enumerate(gradient)}
        return metrics["loss"].item(), found


def on_two(model: ShardedGPT, params: Any) -> Any:
    """Shards on eight devices as shards on two."""
    eight = ShardedGPT(model.config, zero.Axis("zero", (1, 8)), 3, tuning=model.tuning)
    whole = zero.to_host(params, eight.layout, eight.axis)
    return zero.to_devices(whole, model.layout, model.axis, jax.devices()[:2])


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp(request.param), request.param)


def prepared(home: Home, entries: list[dict[str, Any]], **options: Any) -> np.ndarray:
    """The rows that zero-prepare makes of these lines, in the order of the lines: ~t where t is not learned."""
    name = "pairs" if "examples" in options else "chats"
    source = home.place / f"{name}.jsonl"
    source.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    tokenizer = load_tokenizer(str(home.folder / "tokenizer.json"))
    corpus = make(source, home.place, name, tokenizer=tokenizer, row_tokens=CONTEXT, overwrite=True, **options)
    keys: dict[str, Any] = {"only_completions": True, "example": PAIR if "examples" in options else TEXT}
    return rows_of(corpus, vocab_size=home.size.vocab_size, **keys)


def rows_of(corpus: Corpus, context: int = CONTEXT, **keys: Any) -> np.ndarray:
    """The rows of both splits."""
    rows = []
    for index in (corpus.train_index, corpus.validation_index):
        loader = open_loader(index, global_rows=1, context=context, shuffle=False, max_epochs=1, **keys)
        rows += [batch.tokens[0] for batch in loader.batches()]
    return np.stack(rows).reshape(-1, context)


def assert_same_gradients(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    largest = max(np.abs(x).max() for x in expected.values())
    for name, x in expected.items():
        assert np.abs(x).max() > 1e-4 * largest, name
        np.testing.assert_allclose(found[name], x, rtol=1e-3, atol=1e-5 * largest, err_msg=name)


def test_chats_equal_trl(home: Home) -> None:
    """Ids, learned tokens, loss and gradients of chats are those of SFTTrainer with `assistant_only_loss`."""
    batch, loss, gradients = home.chats()
    rows = as_rows(batch["input_ids"], batch["labels"] != -100, batch["attention_mask"], CONTEXT)
    ours = prepared(home, [{"messages": chat} for chat in CHATS], completions=True, one_document_per_row=True)
    np.testing.assert_array_equal(sorted(ours.tolist()), sorted(rows.tolist()))
    special = load_tokenizer(str(home.folder / "tokenizer.json")).special
    (turn_end,) = special.turn_ends
    for row in ours:
        ids = np.maximum(row, ~row)
        assert list(ids[row != -1]).count(special.begin) == (special.begin is not None)
        # Each end of an assistant's turn is learned, once, and none of another's.
        answers = np.flatnonzero((row[:-1] >= 0) & (row[1:] < 0))
        assert (ids[answers] == turn_end).all() and (row == turn_end).sum() == len(answers)
    found, of_leaves = home.gradients(LIKELIHOOD, ours)
    assert found == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(of_leaves, gradients)


@pytest.mark.parametrize(
    ("theirs", "smoothing", "label_smoothing", "stage"),
    [SETTINGS[0], *(pytest.param(*setting, marks=pytest.mark.wide) for setting in SETTINGS[1:])],
)
def test_preferences_equal_trl(home: Home, theirs: str, smoothing: str, label_smoothing: float, stage: int) -> None:
    """Ids, loss and gradients of pairs are those of DPOTrainer, whose reference has its adapters disabled."""
    batch, loss, gradients = home.preferences[theirs, smoothing, label_smoothing]
    rows = as_rows(batch["input_ids"], batch["completion_mask"] == 1, batch["attention_mask"], CONTEXT)
    theirs_by_pair = np.stack(np.split(rows, 2), axis=1).reshape(-1, CONTEXT)  # of [chosen, rejected]
    ours = prepared(home, PAIRS, examples="preferences")
    by_pair = [x.reshape(-1, 2 * CONTEXT).tolist() for x in (ours, theirs_by_pair)]
    assert sorted(by_pair[0]) == sorted(by_pair[1])
    keys = Dpo(beta=BETA, label_smoothing=label_smoothing, smoothing=smoothing)
    found, of_leaves = home.gradients(keys.objective(), ours, stage)
    assert found == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(of_leaves, gradients)


@pytest.mark.wide
def test_preferences_of_strings_equal_trl(home: Home) -> None:
    """An answer ends with the tokenizer's eos, which is learned, as in TRL."""
    theirs = trl_losses.of_pairs(home.folder, home.adapters, STRINGS, home.place / "strings", CONTEXT, BETA)
    ours = prepared(home, STRINGS, examples="preferences")
    by_pair = [sorted(x.reshape(-1, 2 * CONTEXT).tolist()) for x in (ours, theirs.rows)]
    assert by_pair[0] == by_pair[1]
    assert home.gradients(Dpo(beta=BETA).objective(), ours)[0] == pytest.approx(theirs.loss, rel=1e-5)


# The same token begins and ends OLMo 2's texts and ends each of its turns: in a row of several chats nothing tells a
# turn from a text. TRL knows their lengths.
UNDIVIDABLE = {("olmo2", "chats"), ("olmo2", "answers")}
# Of the answers of a chat test_chat_template.py shows that they are completions.
PACKED: set[tuple[str, str]] = set()  # wide: test_chats_equal_trl has one chat at a time
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        case if case in PACKED else pytest.param(*case, marks=pytest.mark.wide if case[0] == "qwen2" else SLOW)
        for case in product(MODELS, LINES)
    ],
)
def test_packed_texts_equal_trl(family: str, kind: str, tmp_path: Path) -> None:
    """Loss and gradient of all weights are those of TRL, where each text has a row of its own and where rows are full.

    Qwen's texts have no beginning: nothing of the text before is read behind its end.
    """
    context = 2 * CONTEXT if family == "olmo2" else CONTEXT  # which spells the roles of its chats in many tokens
    folder = tmp_path / "folder"
    save_folder(folder, family, max_position_embeddings=context)
    lines = LINES[kind]
    if family == "gemma3":  # whose template refuses a system message
        lines = [line for line in lines if "messages" not in line or line["messages"][0]["role"] == "user"]
    theirs = trl_losses.of_lines(folder, None, lines, tmp_path / "trl", context)
    found = open_hf_model(str(folder))
    assert found is not None
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    weights = warm_start(str(folder), ShardedGPT(found.size, zero.Axis("zero", (1, 8)), 3))
    for is_packed in (False, True):
        source = tmp_path / "lines.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options: dict[str, Any] = {"tokenizer": tokenizer, "row_tokens": context, "completions": True}
        if is_packed and (family, kind) in UNDIVIDABLE:
            with pytest.raises(UserError, match="separates the documents of a row; --one-document-per-row accepts it"):
                make(source, tmp_path, "packed", **options)
            continue
        corpus = make(source, tmp_path, str(is_packed), one_document_per_row=not is_packed, **options)
        assert not corpus.train.truncations and corpus.train.rows <= (2 if is_packed else 3)
        rows = rows_of(corpus, vocab_size=found.size.vocab_size, context=context, only_completions=True)
        if not is_packed:
            assert sorted(rows.tolist()) == sorted(theirs.rows.tolist())
        rows = np.concatenate([rows, np.full((4 - len(rows), context), -1, np.int32)])
        separators = Separators(*tokenizer.special.separators) if is_packed else UNDIVIDED
        model = ShardedGPT(found.size, zero.Axis("zero", (1, 2)), 3, separators=separators)
        options = {"learning_rate": lambda step: jnp.float32(0), "objective": LIKELIHOOD}
        tx = optax.stateless(lambda grads, params: grads)
        programs = make_programs(model, tx, StepOptions(**options), jax.devices()[:2])
        state = programs.start(on_two(model, weights))
        metrics = programs.step(state, Batch(rows.reshape(2, 2, context), np.asarray([0, 2], np.int32)))[1]
        assert metrics["loss"].item() == pytest.approx(theirs.loss, rel=1e-5)
        assert metrics["gradient_norm"].item() == pytest.approx(theirs.gradient_norm, rel=1e-4)


@pytest.mark.wide
def test_peft_continues_what_zero_writes(home: Home, tmp_path: Path) -> None:
    """After a step of zero, PEFT opens its folder: same ranks, scales and tables, and the logits of zero's model."""
    import peft
    import torch
    import transformers

    ours = prepared(home, [{"messages": chat} for chat in CHATS], completions=True, one_document_per_row=True)
    model, programs, frozen, state = home.programs(LIKELIHOOD, 3, 1.0)
    state, _ = programs.step(state, Batch(ours.reshape(2, -1, CONTEXT), np.asarray([0, 2], np.int32)), frozen)
    whole = model.layout.leaves_of(zero.to_host(state.params, model.layout, model.axis))
    by_name = {leaf.name: x for leaf, x in zip(model.layout.leaves, whole, strict=True)}
    adapters = model.tuning.adapters  # type: ignore[union-attr]
    written = (by_name.__getitem__, list(by_name), adapters, architecture_of(home.size), str(home.folder), home.size)
    write_peft(tmp_path, *written)
    assert peft_adapters(tmp_path, home.size) == adapters
    # It leaves out what it does not know, so that such adapters are to be merged for it.
    assert objections_to_adapters(tmp_path) == ["modules_to_save", "rank_pattern", "alpha_pattern"]
    again = read_peft(tmp_path, ShardedGPT(home.size, zero.Axis("zero", (1, 8)), 3, tuning=model.tuning))
    for x, y in zip(whole, model.layout.leaves_of(zero.to_host(again, *of_eight(model))), strict=True):
        np.testing.assert_array_equal(x, y)
    auto: Any = transformers.AutoModelForCausalLM
    theirs: Any = peft.PeftModel.from_pretrained(auto.from_pretrained(home.folder, dtype=torch.float32), tmp_path)
    ids = torch.tensor(np.maximum(ours, ~ours)[:, :24]).long()
    with torch.no_grad():
        logits = torch.log_softmax(theirs(input_ids=ids).logits, -1).numpy()
    expected = -np.take_along_axis(logits[:, :-1], ids[:, 1:, None].numpy(), 2)[..., 0].sum()
    rows = ids.numpy().astype(np.int32).reshape(2, -1, 24)
    total = programs.evaluate(model.weights(state.params, {}, frozen), rows)[0]
    assert total.item() == pytest.approx(float(expected), rel=1e-5)


def of_eight(model: ShardedGPT) -> tuple[Any, Any]:
    eight = ShardedGPT(model.config, zero.Axis("zero", (1, 8)), 3, tuning=model.tuning)
    return eight.layout, eight.axis


def test_folders_of_peft_that_are_no_such_adapters(home: Home, tmp_path: Path) -> None:
    """Ranks that differ between layers, other modules and tied tables that are untied are refused by name."""
    config = json.loads((home.adapters / CONFIG_FILE).read_text())
    (tmp_path / "adapter_model.safetensors").symlink_to(home.adapters / "adapter_model.safetensors")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rank_pattern": {r"layers\.0\.self_attn\.q_proj": 9}}, "rank_pattern differs between layers"),
        ({"modules_to_save": ["norm"]}, r"modules_to_save holds 'norm', expected embed_tokens"),
        ({"rank_pattern": {"(": 2}}, "expected modules and numbers under rank_pattern"),
    ]
    if home.size.tied:
        cases.append(({"ensure_weight_tying": False}, "expected ensure_weight_tying=true"))
    for changes, message in cases:
        (tmp_path / CONFIG_FILE).write_text(json.dumps({**config, **changes}))
        with pytest.raises(UserError, match=message):
            peft_adapters(tmp_path, home.size)
    other = Tuning(Adapters(3, 7.0 * 3**0.5, tables=("vocabulary",)))
    with pytest.raises(UserError, match=re.escape("expected tuning.rank_pattern={query: 3}")):
        read_peft(home.adapters, ShardedGPT(home.size, zero.Axis("zero", (1, 8)), 3, tuning=other))
