"""What TRL's trainers make of chats and of pairs: their rows, their losses and their metrics, without training.

Adapters are those of a folder of PEFT. A folder's tokenizer without padding gets its end of text for it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np


class OfTrl(NamedTuple):
    """TRL's values of some texts.

    Attributes:
      rows: `(texts, context)`, ~t where t is not learned and -1 for padding, as in a corpus of zero.
      loss: of all texts together.
      gradient_norm: of the loss by all trained weights; 0 of pairs.
      metrics: by TRL's names, of pairs.
    """

    rows: np.ndarray
    loss: float
    gradient_norm: float
    metrics: dict[str, float]


def as_rows(ids: Any, learned: Any, attended: Any, context: int) -> np.ndarray:
    """Rows of TRL's batch as those of zero."""
    rows = np.full((len(ids), context), -1, np.int32)
    own = np.where(learned, ids, ~np.asarray(ids))
    rows[:, : own.shape[1]] = np.where(attended, own, -1)
    return rows


def tokenizer_of(folder: Path) -> Any:
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def model_of(folder: Path, auto: Any = None) -> Any:
    """In float32, by this class of transformers or `AutoModelForCausalLM`."""
    import torch
    import transformers

    auto = auto or transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32)


def arguments(place: Path, batch: int, context: int) -> dict[str, Any]:
    """What the trainers have in common: all texts in one batch, on CPU, in float32."""
    return {
        "output_dir": str(place),
        "per_device_train_batch_size": batch,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": context,
        "router_aux_loss_coef": 0.0,  # else the loss of experts has a penalty, which zero reports by itself
    }


def of_chats(folder: Path, adapters: Path | None, chats: Sequence[Any], place: Path, context: int) -> OfTrl:
    """`SFTTrainer` with `assistant_only_loss`; in `rows` the texts are in their order."""
    return of_lines(folder, adapters, [{"messages": chat} for chat in chats], place, context)


def of_lines(folder: Path, adapters: Path | None, lines: Sequence[Any], place: Path, context: int) -> OfTrl:
    """As `of_chats`, of lines that hold messages, or a prompt and its completion."""
    import peft
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = model_of(folder)
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, adapters, is_trainable=True)
    trainer = cast(Any, SFTTrainer)(
        model,
        args=SFTConfig(**arguments(place, len(lines), context), assistant_only_loss="messages" in lines[0]),
        train_dataset=Dataset.from_list(list(lines)),
        processing_class=tokenizer_of(folder),
    )
    trainer.model.eval()
    batch = trainer.data_collator(list(trainer.train_dataset))
    rows = as_rows(batch["input_ids"], batch["labels"] != -100, batch["attention_mask"], context)
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    squares = sum(x.grad.square().sum() for x in trainer.model.parameters() if x.grad is not None)
    return OfTrl(rows, loss.item(), float(squares) ** 0.5, {})


def of_pairs(folder: Path, adapters: Path, pairs: Sequence[Any], place: Path, context: int, beta: float) -> OfTrl:
    """`DPOTrainer`, whose reference has its adapters disabled; in `rows` a rejected text follows its chosen one."""
    import peft
    import torch
    from datasets import Dataset
    from safetensors.torch import load_file
    from trl import DPOConfig, DPOTrainer

    trainer = cast(Any, DPOTrainer)(
        model_of(folder),
        args=DPOConfig(**arguments(place, len(pairs), context), beta=beta),
        train_dataset=Dataset.from_list(list(pairs)),
        processing_class=tokenizer_of(folder),
        # New ones, as TRL takes those that a model comes with for its reference.
        peft_config=peft.PeftConfig.from_pretrained(str(adapters), inference_mode=False),
    )
    loaded: Any = peft.set_peft_model_state_dict(trainer.model, load_file(adapters / "adapter_model.safetensors"))
    assert not loaded.unexpected_keys
    trainer.model.eval()
    batch = trainer.data_collator(list(trainer.train_dataset))
    rows = as_rows(batch["input_ids"], batch["completion_mask"] == 1, batch["attention_mask"], context)
    with torch.no_grad():
        loss = trainer._compute_loss(trainer.model, batch, False).item()
    metrics = {name: values[-1] for name, values in trainer._metrics["eval"].items()}
    return OfTrl(np.stack(np.split(rows, 2), axis=1).reshape(-1, context), loss, 0.0, metrics)
