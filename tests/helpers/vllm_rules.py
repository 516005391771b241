"""What vLLM's loader asks of a folder, read in its source: `objections` to a model, `objections_to_adapters` to PEFT's.

Of a model (model_loader/default_loader.py, weight_utils.py, models/registry.py):
- `architectures` of config.json names a class of its table, or one that it runs through transformers.
- Files that end in .safetensors are read; beside an index only those that it names. A consolidated*.safetensors would
  be taken as Mistral's own format.
- Each tensor is a parameter of that class under transformers' name, and no parameter is left without one.
- eos_token_id of generation_config.json ends a text, and tokens have to lie in the vocabulary.

Of adapters (lora/peft_helper.py, lora/lora_model.py, lora/utils.py): r, lora_alpha, target_modules are required,
modules_to_save and DoRA are refused, tensors are lora_A and lora_B of linear layers. Keys that it does not know are
left out, rank_pattern and alpha_pattern among them: then every product has the scale lora_alpha / r.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

# Of vLLM 0.33: the architectures of `_TEXT_GENERATION_MODELS` and `_TRANSFORMERS_SUPPORTED_MODELS` that zero writes.
OF_ITS_OWN = (
    *("ApertusForCausalLM", "BloomForCausalLM", "DeepseekV3ForCausalLM", "Ernie4_5ForCausalLM", "GPT2LMHeadModel"),
    *("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM"),
    *("GptOssForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"),
    *("MixtralForCausalLM", "OlmoeForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM"),
    *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"),
    *("Qwen3_5MoeForCausalLM", "StableLmForCausalLM"),
)
THROUGH_TRANSFORMERS = (
    *("ArceeForCausalLM", "GPTNeoXForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "SeedOssForCausalLM"),
    *("SmolLM3ForCausalLM", "Starcoder2ForCausalLM"),
)
DTYPES = ("float32", "bfloat16", "float16")


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}


def tensors_of(folder: Path) -> tuple[list[str], list[str]]:
    """The names of all tensors that would be read, and what is wrong with their files."""
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    wrong = [f"{name} is taken as Mistral's own format" for name in files if name.startswith("consolidated")]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        places = _json(index)["weight_map"]
        wrong += [f"{name} is missing" for name in sorted(set(places.values()) - set(files))]
        files = [name for name in files if name in places.values()]
    names: list[str] = []
    for name in files:
        with safe_open(folder / name, "numpy") as file:
            names += file.keys()
    wrong += [f"tensor {name} comes twice" for name in sorted(set(names)) if names.count(name) > 1]
    return names, wrong if files else [*wrong, "no weights"]


def is_run(architecture: str) -> str:
    """How vLLM runs a class of transformers; one that its table lacks, if attention can be replaced in it."""
    import transformers

    model: Any = getattr(transformers, architecture)
    if architecture in OF_ITS_OWN:
        return "its own class"
    if architecture in THROUGH_TRANSFORMERS or model.is_backend_compatible() or model._can_set_attn_implementation():
        return "through transformers"
    return "no"


def objections(folder: Path, parameters: set[str] | None = None) -> list[str]:
    """What vLLM would refuse or read otherwise; `parameters` are transformers' names, without one that is tied."""
    config = _json(folder / "config.json")
    names, wrong = tensors_of(folder)
    (architecture,) = config["architectures"]
    if is_run(architecture) == "no" and architecture != "GPTNeoForCausalLM":
        wrong.append(f"architecture {architecture}")
    if config.get("dtype", config.get("torch_dtype")) not in DTYPES:
        wrong.append(f"dtype {config.get('dtype')}")
    ends = _json(folder / "generation_config.json").get("eos_token_id", [])
    outside = [end for end in (ends if isinstance(ends, list) else [ends]) if not 0 <= end < config["vocab_size"]]
    wrong += [f"eos_token_id {end}" for end in outside]
    if not (folder / "tokenizer.json").exists():
        wrong.append("no tokenizer")
    if parameters is not None:
        wrong += [f"tensor {name} is not read" for name in sorted(set(names) - parameters)]
        wrong += [f"tensor {name} is missing" for name in sorted(parameters - set(names))]
    return wrong


def objections_to_adapters(folder: Path) -> list[str]:
    """What vLLM would refuse of a folder of PEFT, or compute otherwise."""
    config = _json(folder / "adapter_config.json")
    wrong = [f"no {key}" for key in ("r", "lora_alpha", "target_modules") if key not in config]
    wrong += [key for key in ("modules_to_save", "use_dora", "rank_pattern", "alpha_pattern") if config.get(key)]
    targets = {name.rpartition(".")[2] for name in config.get("target_modules", [])}
    with safe_open(folder / "adapter_model.safetensors", "numpy") as file:
        names = list(file.keys())
    for name in names:
        parts = name.removeprefix("base_model.model.").split(".")
        is_table = parts[-2:] in (["embed_tokens", "weight"], ["lm_head", "weight"])
        if not is_table and (parts[-2] not in ("lora_A", "lora_B") or parts[-1] != "weight"):
            wrong.append(f"tensor {name}")
        elif not is_table and parts[-3] not in targets:
            wrong.append(f"module {'.'.join(parts[:-2])}")
    return wrong
