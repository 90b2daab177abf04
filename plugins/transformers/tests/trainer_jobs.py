"""What the ranks of the Trainer tests run."""

from __future__ import annotations

import logging as std_logging
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

WORDS = 64


USERS_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_cpu_offload: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_activation_checkpointing: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
mixed_precision: bf16
num_machines: 1
num_processes: {processes}
"""
"""A configuration file of Accelerate's, as users have them."""


def quiet() -> None:
    import transformers
    from transformers.trainer_callback import PrinterCallback

    PrinterCallback.on_log = lambda *_, **__: None

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    std_logging.disable(std_logging.WARNING)


def without_launcher() -> None:
    """Leave the world of one that the test started, as ``python train.py`` would find none.

    Accelerate would wrap the model in DDP over gloo, whose reducer may hang where it outlives the process group.
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def llama(seed: int = 4, *, tied: bool = False, dropout: float = 0.0) -> Any:
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, use_cache=False, attention_dropout=dropout,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Words(torch.utils.data.Dataset):
    """Counting words from anywhere; labels of ragged length."""

    def __init__(self, size: int, *, begin: int = 0) -> None:
        generator = torch.Generator().manual_seed(begin)
        self.first = torch.randint(WORDS, (size,), generator=generator)
        self.length = torch.randint(2, 9, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = (self.first[index] + torch.arange(9)) % WORDS
        labels = torch.where(torch.arange(9) < self.length[index], words, -100)
        return {"input_ids": words, "labels": labels}


def arguments(cls: Any, folder: str | Path, **given: Any) -> Any:
    settings = {
        "output_dir": str(folder), "use_cpu": True, "per_device_train_batch_size": 4, "max_steps": 6,
        "learning_rate": 1e-2, "adam_epsilon": 1e-4, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "train_sampling_strategy": "sequential", "disable_tqdm": True, "log_level": "error",
        "lr_scheduler_type": "linear",         "max_grad_norm": 1.0,
    }  # fmt: skip
    return cls(**{**settings, **given})


def history(trainer: Any, *keys: str) -> dict[str, list[float]]:
    return {key: [entry[key] for entry in trainer.state.log_history if key in entry] for key in keys}


def stock(folder: str, model: Any = llama, train: int = 22, evaluate: int = 13, resume: Any = None, **more: Any) -> Any:
    """Transformers' own Trainer, on one process."""
    import transformers

    quiet()
    without_launcher()
    args = arguments(transformers.TrainingArguments, folder, **more)
    trainer = transformers.Trainer(model(), args, train_dataset=Words(train), eval_dataset=Words(evaluate, begin=1))
    trainer.train(resume_from_checkpoint=resume)
    state = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
    return history(trainer, "loss", "grad_norm", "eval_loss", "learning_rate"), state


def configured(config: dict[str, Any]) -> None:
    """Make this the configuration that a launcher would have handed over."""
    import os

    from drivetrain.api.programs import load_config

    os.environ["DRIVETRAIN_CONFIG"] = load_config(overrides=config, environ={}).to_json()


def ours(
    config: dict[str, Any],
    folder: str,
    model: Any = llama,
    train: int = 22,
    evaluate: int = 13,
    resume: Any = None,
    first: bool = False,
    **given: Any,
) -> Any:
    """Ours, under any backend; the first rank's history and weights."""
    import drivetrain_transformers

    quiet()
    configured({"use_cpu": True, **config})
    args = arguments(drivetrain_transformers.TrainingArguments, folder, **given)
    trainer = drivetrain_transformers.Trainer(
        model(), args, train_dataset=Words(train), eval_dataset=Words(evaluate, begin=1)
    )
    assert trainer.accelerator.distributed_type == config["distributed_type"]
    before = trainer.evaluate()["eval_loss"] if first else None
    trainer.train(resume_from_checkpoint=resume)
    whole = trainer.accelerator.get_state_dict(trainer.model)
    state = {name: tensor.detach().clone() for name, tensor in whole.items()}
    trainer.accelerator.end_training()
    return history(trainer, "loss", "grad_norm", "eval_loss", "learning_rate"), state, before


# ---- one group of ranks does all that a backend is asked -----------------------------------------------------------


def uneven(config: dict[str, Any], folder: str, dp: int) -> Any:
    """13 samples in windows of 6: ranks have parts of unequal sizes, and in a world of 3 one ends with none."""
    return ours(
        config, folder, train=13, per_device_train_batch_size=6 // dp, gradient_accumulation_steps=1, max_steps=6,
        per_device_eval_batch_size=4,
    )  # fmt: skip


def best(config: dict[str, Any], folder: str, dp: int, **given: Any) -> Any:
    """The model of the best of several evaluations, in the middle of a run that ends badly."""
    import drivetrain_transformers

    quiet()
    configured({"use_cpu": True, **config})
    args = arguments(
        drivetrain_transformers.TrainingArguments, folder, per_device_train_batch_size=6 // dp, eval_strategy="steps",
        eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True, learning_rate=0.03,
        lr_scheduler_type="constant",
        metric_for_best_model="eval_loss", **given,
    )  # fmt: skip
    trainer = drivetrain_transformers.Trainer(llama(), args, train_dataset=Words(22), eval_dataset=Words(13, begin=1))
    trainer.train()
    found = min(history(trainer, "eval_loss")["eval_loss"])
    last = history(trainer, "eval_loss")["eval_loss"][-1]
    again = trainer.evaluate()["eval_loss"]
    trainer.accelerator.end_training()
    return found, last, again


def predictions(config: dict[str, Any], folder: str) -> Any:
    """Labels and predictions of 13 samples, in order."""
    import drivetrain_transformers

    quiet()
    configured({"use_cpu": True, **config})
    args = arguments(
        drivetrain_transformers.TrainingArguments, folder, per_device_eval_batch_size=2, remove_unused_columns=False
    )
    trainer = drivetrain_transformers.Trainer(llama(), args)
    result = trainer.predict(Words(13, begin=1))
    trainer.accelerator.end_training()
    return torch.as_tensor(result.predictions), torch.as_tensor(result.label_ids), result.metrics["test_loss"]


def whole(folder: str) -> dict[str, Any]:
    """What stock Trainer finds on one process, as far as it is right."""
    found: dict[str, Any] = {"plain": stock(f"{folder}/plain", **WINDOWS)}
    found["uneven"] = stock(f"{folder}/uneven", train=13, per_device_train_batch_size=6, max_steps=6)
    torch.manual_seed(0)
    model, data = llama().eval(), Words(13, begin=1)
    batch = torch.utils.data.default_collate([data[index] for index in range(13)])
    with torch.no_grad():
        found["loss"] = model(**batch).loss.item()
        found["logits"] = model(input_ids=batch["input_ids"]).logits
    found["labels"] = batch["labels"]
    # Saved in mid-epoch, to be resumed by others.
    found["shuffled"] = stock(
        f"{folder}/stock", save_strategy="steps", save_steps=3, train_sampling_strategy="sequential", **WINDOWS
    )
    return found


WINDOWS: dict[str, Any] = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}


def backend(config: dict[str, Any], folder: str, dp: int, mine: str) -> dict[str, Any]:
    """Everything that one backend is asked, in one group of ranks."""
    windows = {"per_device_train_batch_size": 6 // dp, "gradient_accumulation_steps": 2}
    found: dict[str, Any] = {}
    found["plain"] = ours(config, f"{folder}/{mine}/plain", eval_strategy="steps", eval_steps=2, **windows)
    found["evaluated first"] = ours(config, f"{folder}/{mine}/first", first=True, **windows)
    found["uneven"] = uneven(config, f"{folder}/{mine}/uneven", dp)
    found["best"] = best(config, f"{folder}/{mine}/best", dp)
    found["best only"] = best(config, f"{folder}/{mine}/only", dp, save_only_model=True)
    found["predictions"] = predictions(config, f"{folder}/{mine}/predict")
    shuffled = {"train_sampling_strategy": "random", **windows}
    found["shuffled"] = ours(config, f"{folder}/{mine}/run", save_strategy="steps", save_steps=3, **shuffled)
    return found


def resumed(config: dict[str, Any], folder: str, dp: int, checkpoints: dict[str, str]) -> dict[str, Any]:
    """Runs that go on from checkpoints of others."""
    windows = {"per_device_train_batch_size": 6 // dp, "gradient_accumulation_steps": 2}
    return {
        name: ours(config, f"{folder}/{name}", resume=path, train_sampling_strategy="random", **windows)
        for name, path in checkpoints.items()
    }


# ---- what stock Trainer does wrong, and what is refused ------------------------------------------------------------


def t5(seed: int = 4) -> Any:
    """Takes ``**kwargs`` and ignores ``num_items_in_batch``."""
    import transformers

    torch.manual_seed(seed)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def by_hand(train: int, size: int, **_: Any) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """T5 on whole batches, its loss a sum over labels divided by their number: what every split must amount to."""
    quiet()
    model, data = t5(), Words(train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.0)
    losses, norms = [], []
    for step in range(6):
        begin = step * size % train
        batch = torch.utils.data.default_collate([data[index] for index in range(begin, min(begin + size, train))])
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / 6)
        loss = model(**batch).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"loss": losses, "grad_norm": norms}, {name: one.detach() for name, one in model.state_dict().items()}


def ignoring(config: dict[str, Any], folder: str, dp: int, accumulate: int) -> Any:
    """T5 in windows of 12 samples."""
    return ours(
        config, folder, model=t5, train=24, per_device_train_batch_size=12 // dp // accumulate,
        gradient_accumulation_steps=accumulate,
    )  # fmt: skip


def both_ignoring(folder: str, dp: int) -> list[Any]:
    ddp = {"distributed_type": "ddp"}
    return [ignoring(ddp, f"{folder}/1", dp, 1), ignoring(ddp, f"{folder}/2", dp, 2), seq2seq(ddp, f"{folder}/3")]


def seq2seq(config: dict[str, Any], folder: str, end: int = 1) -> Any:
    """What T5 generates for 13 samples, each until this token: the tokens, and the labels."""
    import drivetrain_transformers

    quiet()
    configured({"use_cpu": True, **config})
    args = arguments(
        drivetrain_transformers.Seq2SeqTrainingArguments, folder, per_device_eval_batch_size=2,
        predict_with_generate=True, generation_max_length=6,
    )  # fmt: skip
    model = t5()
    model.generation_config.eos_token_id = end
    trainer = drivetrain_transformers.Seq2SeqTrainer(model, args)
    result = trainer.predict(Words(13, begin=1))
    trainer.accelerator.end_training()
    return torch.as_tensor(result.predictions), torch.as_tensor(result.label_ids)


class Own:
    """What a script's own Trainer overrides."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """A mean over labels, whatever the number of items is."""
        outputs = model(**inputs)
        self.reached = getattr(self, "reached", 0) + 1
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def own_loss(folder: str, dp: int, accumulate: int) -> Any:
    """A subclass with a loss of its own, on Drivetrain, with arguments of Transformers' own class."""
    import transformers

    from drivetrain_transformers import on_drivetrain

    quiet()
    configured({"use_cpu": True, "distributed_type": "ddp"})
    script = type("OwnTrainer", (Own, transformers.Trainer), {})
    args = arguments(
        transformers.TrainingArguments, folder, per_device_train_batch_size=12 // dp // accumulate,
        gradient_accumulation_steps=accumulate,
    )  # fmt: skip
    trainer = on_drivetrain(script)(t5(), args, train_dataset=Words(24))
    assert isinstance(trainer, script)
    assert args.world_size == dp
    trainer.train()
    assert trainer.reached == 6 * accumulate
    state = trainer.accelerator.get_state_dict(trainer.model)
    trainer.accelerator.end_training()
    return history(trainer, "loss", "grad_norm"), {name: one.detach().clone() for name, one in state.items()}


def from_stock(folder: str, checkpoint: str, config: dict[str, Any], dp: int, **more: Any) -> Any:
    windows = {"per_device_train_batch_size": 6 // dp, "gradient_accumulation_steps": 2}
    try:
        return ours(config, folder, resume=checkpoint, **windows, **more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def refused(folder: str, **given: Any) -> str:
    import drivetrain_transformers

    quiet()
    configured({"use_cpu": True})
    try:
        drivetrain_transformers.TrainingArguments(output_dir=folder, use_cpu=True, **given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def file_of_user(folder: str, file: str) -> Any:
    """The user's own file, with the number of processes and the device of a test."""
    import os

    import drivetrain_transformers
    from drivetrain.api.programs import load_config

    quiet()
    os.environ["DRIVETRAIN_CONFIG"] = load_config(file, overrides={"use_cpu": True}, environ={}).to_json()
    args = arguments(
        drivetrain_transformers.TrainingArguments, folder, per_device_train_batch_size=3, save_strategy="steps",
        save_steps=3, gradient_accumulation_steps=2, dataloader_pin_memory=True,
        accelerator_config={"non_blocking": True},
    )  # fmt: skip
    trainer = drivetrain_transformers.Trainer(llama(), args, train_dataset=Words(22))
    trainer.train()
    facts = trainer.accelerator.distributed_type, trainer.accelerator.mixed_precision
    dtypes = {str(parameter.dtype) for parameter in trainer.model.parameters()}
    kinds = {type(parameter.data).__name__ for parameter in trainer.model.parameters()}
    trainer.accelerator.end_training()
    return history(trainer, "loss"), facts, dtypes, kinds


# ---- PEFT ----------------------------------------------------------------------------------------------------------


def lora(seed: int = 4) -> Any:
    """An adapter on the attention of a Llama; its matrices begin with numbers that train."""
    import peft

    model = llama(seed)
    torch.manual_seed(seed + 1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(model, config)


def lora_and_head(seed: int = 4) -> Any:
    """An adapter, and beside it the embedding and the head, which are trained whole."""
    import peft

    model = llama(seed)
    torch.manual_seed(seed + 1)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0,
        modules_to_save=["embed_tokens", "lm_head"],
    )  # fmt: skip
    return peft.get_peft_model(model, config)


def adapters(config: dict[str, Any], folder: str, dp: int, model: Any = lora) -> dict[str, Any]:
    """Training, the best model, and a resume in mid-epoch, of an adapter."""
    windows = {"per_device_train_batch_size": 6 // dp, "gradient_accumulation_steps": 2}
    save = {"save_strategy": "steps", "save_steps": 3}
    found = {"plain": ours(config, f"{folder}/plain", model=model, **save, **windows)}
    found["resumed"] = ours(config, f"{folder}/resumed", model=model, resume=f"{folder}/plain/checkpoint-3", **windows)
    found["evaluated first"] = ours(
        config, f"{folder}/first", model=model, first=True, resume=f"{folder}/plain/checkpoint-3", **windows
    )
    return found


def loaded_adapter(folder: str) -> Any:
    """The state of a model that PEFT makes of a checkpoint."""
    import peft

    quiet()
    return dict(peft.PeftModel.from_pretrained(llama(), folder).state_dict())


# ---- TRL ---------------------------------------------------------------------------------------------------------


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, WORDS)}}
    made = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def texts(kind: str, size: int = 24) -> Any:
    """Counting words of ragged length; for preferences, beside words that do not count."""
    import datasets

    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(size):
        first, length = (int(torch.randint(3, 40, (), generator=generator)) for _ in range(2))
        length = 3 + length % 7
        counting = " ".join(f"w{(first + number) % 60 + 3}" for number in range(length))
        others = " ".join(f"w{int(word)}" for word in torch.randint(3, WORDS, (length,), generator=generator))
        row = {"prompt": f"w{first}", "chosen": f" {counting}", "rejected": f" {others}"}
        if kind == "reward":
            row = {"chosen": counting, "rejected": others}
        elif kind in ("grpo", "rloo"):
            row = {"prompt": f"w{first} w{(first + length) % 60 + 3}"}
        rows.append({"text": counting} if kind == "sft" else row)
    return datasets.Dataset.from_list(rows)


class Recited:
    """Completions of a trainer that generates, as a function of the prompt and the place in the generation batch."""

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        first = self.accelerator.process_index * len(prompt_ids)
        found = []
        for row, prompt in enumerate(prompt_ids, first):
            length = 2 + (row * 5 + prompt[0]) % 5
            words = [3 + (prompt[0] + row * 7 + number * (1 + row % 3)) % 60 for number in range(length)]
            found.append([*words, 2] if row % 2 else words)
        return found if self._tag_names[-1] == "rloo" else (found, None)


def even_words(completions: Any, **_: Any) -> list[float]:
    """A reward: how many words of a completion are even, and a little for its length."""
    rows = [[int(word[1:]) for word in text.split() if word.startswith("w")] for text in completions]
    return [sum(word % 2 == 0 for word in row) + 0.1 * len(row) for row in rows]


def reward_model() -> Any:
    import transformers

    config = llama().config
    config.num_labels = 1
    torch.manual_seed(4)
    return transformers.LlamaForSequenceClassification(config)


def saved_llama(folder: str) -> Any:
    """A Llama of a folder, from which a trainer reads its reference too. The first run's main process writes it."""
    import transformers

    place = Path(folder).parent / "model"
    if not place.exists() and os.environ.get("RANK", "0") == "0":
        place.parent.mkdir(parents=True, exist_ok=True)
        written = tempfile.mkdtemp(dir=place.parent)
        llama().save_pretrained(written)
        Path(written).rename(place)
    while not place.exists():
        time.sleep(0.05)
    return transformers.LlamaForCausalLM.from_pretrained(place, use_cache=False)


ENDS = list(range(2, 40, 2))
"""Tokens that end a completion, where a model without training shall end soon, and not everywhere at once."""


def with_trl(
    kind: str,
    folder: str,
    config: dict[str, Any] | None = None,
    dp: int = 1,
    *,
    adapter: bool = False,
    size: int = 24,
    resume: str | None = None,
    **given: Any,
) -> Any:
    """A trainer of TRL, stock where there is no configuration."""
    trainer = trl_trainer(kind, folder, config, dp, adapter=adapter, size=size, **given)
    trainer.train(resume_from_checkpoint=resume)
    trainer.accelerator.end_training()
    return history(trainer, "loss", "grad_norm", *METRICS.get(kind, ()))


def several_with_trl(
    runs: list[tuple[str, bool]], folder: str, config: dict[str, Any] | None = None, dp: int = 1
) -> dict[tuple[str, bool], Any]:
    """Runs of several trainers in turn, in one group of ranks: each is a kind, with an adapter or without."""
    return {
        (kind, adapter): with_trl(kind, f"{folder}/{kind}-{adapter}", config, dp, adapter=adapter)
        for kind, adapter in runs
    }


METRICS = {"reward": ("accuracy", "mean_reward", "margin"), "grpo": ("reward",), "rloo": ("reward", "kl")}
"""What else a trainer logs and one process finds too."""


def trl_trainer(
    kind: str,
    folder: str,
    config: dict[str, Any] | None = None,
    dp: int = 1,
    *,
    adapter: bool = False,
    size: int = 24,
    recited: bool = True,
    **given: Any,
) -> Any:
    """A trainer of TRL on a tiny model. Those that generate recite, or else call the model's ``generate``."""
    import datasets
    import trl

    from drivetrain_transformers import on_drivetrain

    quiet()
    datasets.disable_progress_bars()
    settings, trainer_class = {
        "sft": (trl.SFTConfig, trl.SFTTrainer),
        "dpo": (trl.DPOConfig, trl.DPOTrainer),
        "reward": (trl.RewardConfig, trl.RewardTrainer),
        "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
        "rloo": (trl.RLOOConfig, trl.RLOOTrainer),
    }[kind]
    generates = kind in ("grpo", "rloo")
    if generates and recited:
        trainer_class = type(trainer_class.__name__, (Recited, trainer_class), {})
    if config is not None:
        configured({"use_cpu": True, **config})
        trainer_class = on_drivetrain(trainer_class)
    else:
        without_launcher()
    if generates:
        given = {
            "num_generations": 3, "max_completion_length": 7, "beta": 0.1, "num_iterations": 2,
            "shuffle_dataset": False, **given,
        }  # fmt: skip
    args = arguments(
        settings, folder, **{"per_device_train_batch_size": 6 // dp, "gradient_accumulation_steps": 2, "bf16": False,
        **given},
    )  # fmt: skip
    more: dict[str, Any] = {"ref_model": llama()} if kind == "dpo" and not adapter else {}
    if generates:
        more["reward_funcs"] = even_words
    if adapter:
        import peft

        more["peft_config"] = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = reward_model() if kind == "reward" else saved_llama(folder) if generates else llama()
    trainer = trainer_class(
        model=model, args=args, train_dataset=texts(kind, size), processing_class=tokenizer(), **more
    )
    if config is not None:
        assert trainer.accelerator.distributed_type == config["distributed_type"]
    return trainer


def generating(kind: str, folder: str, config: dict[str, Any] | None = None, dp: int = 1) -> Any:
    """A trainer that generates by the model: what it says first without chance, then metrics of a sampled run."""
    settings: dict[str, Any] = {"recited": False, "generation_kwargs": {"eos_token_id": ENDS}}
    first = {"do_sample": False, "eos_token_id": ENDS}
    greedy = trl_trainer(
        kind, f"{folder}/greedy", config, dp, max_steps=1, **{**settings, "generation_kwargs": first}
    )  # fmt: skip
    greedy.train()
    said = list(greedy._logs["completion"])
    greedy.accelerator.end_training()
    sampled = trl_trainer(kind, f"{folder}/sampled", config, dp, max_steps=2, **settings)
    before = {name: one.detach().clone() for name, one in llama().named_parameters()}
    sampled.train()
    after = sampled.accelerator.get_state_dict(sampled.model)
    moved = max((float((after[name] - one).abs().max()) for name, one in before.items() if name in after), default=None)
    found = history(sampled, "loss", "reward", "completions/max_length")
    lists = list(sampled._logs["completion"])
    sampled.accelerator.end_training()
    return said, lists, found, moved


# ---- tied weights ------------------------------------------------------------------------------------------------


def tied(seed: int = 4) -> Any:
    return llama(seed, tied=True)


def tied_run(config: dict[str, Any], folder: str, dp: int) -> Any:
    """A run that saves and loads the best model, and its resume; then what ``from_pretrained`` reads."""
    import transformers

    windows = {"per_device_train_batch_size": 6 // dp, "gradient_accumulation_steps": 2}
    save = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    run = ours(config, f"{folder}/run", model=tied, load_best_model_at_end=True, **save, **windows)
    again = ours(config, f"{folder}/again", model=tied, resume=f"{folder}/run/checkpoint-3", **windows)
    read = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/run/checkpoint-6")
    assert read.lm_head.weight is read.model.embed_tokens.weight
    return run, again, {name: one.clone() for name, one in read.state_dict().items()}
