"""The demo: a model of 0.7 million parameters learns to show its work, from nothing, on a CPU.

A supervised warm-up on reasoning-gym's `chain_sum` gives a fresh Llama both ways of answering: the number alone (most examples), and the
running sums between <think> tags before it. Alone it is quick and often wrong, worked it is long and mostly right. Then GRPO, whose only
signal is reasoning-gym's verifier, makes it prefer the way that works.
"""

from __future__ import annotations

import json
import platform
import random
import shutil
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_trainer import checkpoint, report
from grpo_trainer.config import Config
from grpo_trainer.rollout import Prompts
from grpo_trainer.tasks import Entry, Problems
from grpo_trainer.train import CHECKPOINTS, is_worked, load_model, load_tokenizer, train

WARMUP = "warmup"
