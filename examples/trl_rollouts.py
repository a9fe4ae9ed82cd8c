"""Reinforcement learning with trl's GRPOTrainer, whose completions foresay generates.

python examples/trl_rollouts.py     needs trl (1.16 was tried); a tiny model is made on the spot
"""

from __future__ import annotations

import copy
import string
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import foresay
from foresay import SamplingParams


class Rollouts:
    """trl's `rollout_func`: generates with a copy of the policy, whose weights it updates after each step of training."""

    def __init__(self, policy: Any, tokenizer: Any, **settings: Any) -> None:
        """policy: the model that is trained. settings: of `foresay.load`, such as drafter."""
        self.generator = foresay.load(copy.deepcopy(policy).eval(), tokenizer=tokenizer, **settings)
        self.step = 0
        """The step of training whose weights the copy has."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return the token ids of prompts and completions, and the log-probability of each token of a completion.

        trl repeats a prompt for each of its completions, and its seed decides what is drawn.
        """
        if trainer.state.global_step != self.step:
            policy = trainer.accelerator.unwrap_model(trainer.model)
            self.generator.update_weights(policy.named_parameters())
            self.step = trainer.state.global_step
        settings = trainer.args
        params = SamplingParams(
            max_new_tokens=settings.max_completion_length,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k or 0,
            min_p=settings.min_p or 0.0,
            repetition_penalty=settings.repetition_penalty,
            logprobs=0,
            seed=int(torch.randint(2**31, ())),
        )
        done = self.generator.generate(prompts, params)
        return {
            "prompt_ids": [one.prompt_token_ids for one in done],
            "completion_ids": [one.token_ids for one in done],
            "logprobs": [[token.logprob for token in one.logprobs or ()] for one in done],
        }


def tiny_policy() -> tuple[Any, Any]:
    """A random model of one layer over characters, and its tokenizer."""
    words = ["<end>", *string.ascii_lowercase, " "]
    letters = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>", pad_token="<end>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(words), eos_token_id=0, pad_token_id=0, bos_token_id=None, **sizes)
    return LlamaForCausalLM(config), tokenizer


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of the letter a."""
    return [text.count("a") / max(len(text), 1) for text in completions]


def main(steps: int = 30) -> list[float]:
    """Train the tiny model to write a, and return the mean reward of each step."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    policy, tokenizer = tiny_policy()
    rollouts = Rollouts(policy, tokenizer, drafter="suffix")
    config = GRPOConfig(
        output_dir="build/trl",
        max_steps=steps,
        learning_rate=0.01,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=24,
        beta=0.0,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    prompts = Dataset.from_dict({"prompt": ["the sea is", "once upon a time"] * 8})
    trainer = GRPOTrainer(policy, reward, config, prompts, processing_class=tokenizer, rollout_func=rollouts)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    print(f"mean reward: {rewards[0]:.2f} in the first step, {rewards[-1]:.2f} in step {len(rewards)}")
    return rewards


if __name__ == "__main__":
    main()
