"""A tokenizer, generation backends and environments that compute real answers."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor

import torch

from column_io import BatchedDataDict
from dataplane_core import InMemoryDataPlaneClient
from rollout_actor import EnvironmentReturn, SyncRolloutActor

DP_CFG = {"enabled": True, "impl": "in_memory"}


class CharTokenizer:
    """One token per character."""

    pad_token_id = 0

    def __call__(self, text, *, return_tensors, add_special_tokens):
        assert (return_tensors, add_special_tokens) == ("pt", False)
        # An empty text returns floats, as from Hugging Face's tokenizers.
        return {"input_ids": torch.tensor([[ord(char) for char in text]])}

    def batch_decode(self, sequences, *, skip_special_tokens):
        assert skip_special_tokens
        return [decode(tokens) for tokens in sequences]


def tokens_of(text):
    return torch.tensor([ord(char) for char in text], dtype=torch.int64)


def decode(tokens):
    return "".join(chr(token) for token in tokens.tolist())


def logprobs_of(tokens):
    """Return the log-probabilities of `Adder`: a function of the token, never 0."""
    return -(1.0 + tokens % 7) / 10


class Adder:
    """Backend that answers the last ``a+b=`` of each prompt, from the prompt alone.

    Args:
        max_new_tokens: maximum tokens of a response; a longer one is cut and marked truncated.
        events: list to which it appends the name of each call.
    """

    def __init__(self, *, max_new_tokens=20, events=None):
        self.max_new_tokens = max_new_tokens
        self.events = [] if events is None else events
        self.seen = []

    def respond(self, prompt, stop_strings):
        sums = re.findall(r"(\d+)\+(\d+)=", prompt)
        text = f"{sum(map(int, sums[-1]))}. So it is." if sums else "?"
        for stop in stop_strings or []:
            place = text.find(stop)
            text = text if place < 0 else text[: place + len(stop)]
        return text[: self.max_new_tokens], len(text) > self.max_new_tokens

    def generate(self, data, *, greedy):
        self.events.append("generate")
        prompts = [
            decode(row[:length])
            for row, length in zip(data["input_ids"], data["input_lengths"], strict=True)
        ]
        self.seen.append({"prompts": prompts, "greedy": greedy, **data})
        responses = [
            self.respond(prompt, stops)
            for prompt, stops in zip(prompts, data["stop_strings"], strict=True)
        ]
        rows = [
            tokens_of(prompt + text) for prompt, (text, _) in zip(prompts, responses, strict=True)
        ]
        lengths = torch.tensor([len(row) for row in rows])
        output_ids = torch.zeros(len(rows), int(lengths.max()) + 2, dtype=torch.int64)
        logprobs = torch.zeros(output_ids.shape)
        for place, row in enumerate(rows):
            start = data["input_lengths"][place]
            output_ids[place, : len(row)] = row
            logprobs[place, start : len(row)] = logprobs_of(row[start:])
        return BatchedDataDict(
            output_ids=output_ids,
            generation_lengths=lengths - data["input_lengths"],
            unpadded_sequence_lengths=lengths,
            logprobs=logprobs,
            truncated=torch.tensor([cut for _, cut in responses]),
        )

    def snapshot_step_metrics(self):
        self.events.append("snapshot")

    def clear_logger_metrics(self):
        self.events.append("clear")

    def get_logger_metrics(self):
        self.events.append("metrics")
        return {"calls": self.events.count("generate")}

    def finish_generation(self):
        self.events.append("finish")


class AsyncAdder(Adder):
    """`Adder` that also answers one row at a time, later rows first."""

    pending = 0

    async def generate_async(self, data, *, greedy):
        self.pending += 1
        for _ in range(20 - self.pending):
            await asyncio.sleep(0)
        yield 0, self.generate(data, greedy=greedy)


class PlainAdder:
    """An `Adder` without ``snapshot_step_metrics``, which not every backend has."""

    def __init__(self):
        adder = Adder()
        self.generate = adder.generate
        self.clear_logger_metrics = adder.clear_logger_metrics
        self.get_logger_metrics = adder.get_logger_metrics
        self.finish_generation = adder.finish_generation


class Arithmetic:
    """Environment that asks the sums in ``info["more"]``; reward 1 for a right answer, else 0."""

    def step(self, message_logs, extra_env_info):
        observations, metadata, rewards, ends = [], [], [], []
        for log, info in zip(message_logs, extra_env_info, strict=True):
            assert all(set(turn) == {"role", "content"} for turn in log)
            question = next(turn for turn in reversed(log) if turn["role"] != "assistant")
            expected = sum(map(int, re.findall(r"(\d+)\+(\d+)=", question["content"])[-1]))
            rewards.append(float(log[-1]["content"].startswith(f"{expected}.")))
            more = info["more"]
            text = f" {more[0]}" if more else ""
            observations.append({"role": "environment", "content": text})
            metadata.append({"more": more[1:]})
            ends.append(not more)
        return EnvironmentReturn(
            observations, metadata, None, torch.tensor(rewards), torch.tensor(ends), None
        )


class Method:
    """A method with a Ray actor's interface, which runs in this process."""

    def __init__(self, function):
        self.remote = function


class Local:
    """Environment of this process whose ``step.remote`` returns the result itself."""

    def __init__(self, environment):
        self.step = Method(environment.step)


class Threaded:
    """Environment of this process whose ``step.remote`` returns a future."""

    def __init__(self, environment):
        self._threads = ThreadPoolExecutor(4)
        self.step = Method(lambda *args: self._threads.submit(environment.step, *args))


class Scripted:
    """An environment that answers from ``script(message_log, info)``, one dict per row.

    The dict has ``EnvironmentReturn``'s names in the singular; missing ones have neutral defaults.
    Each of ``parts`` replaces the part of the return with its name.
    """

    def __init__(self, script, **parts):
        self.step = Method(self._step)
        self._script = script
        self._parts = parts
        self.calls = []

    def _step(self, message_logs, extra_env_info):
        self.calls.append((message_logs, extra_env_info))
        rows = [
            self._script(log, info) for log, info in zip(message_logs, extra_env_info, strict=True)
        ]
        answer = {
            "observations": [
                {"role": "environment", "content": row.get("observation", "")} for row in rows
            ],
            "metadata": [row.get("metadata") for row in rows],
            "next_stop_strings": [row.get("stop_strings") for row in rows],
            "rewards": self._rewards([row.get("reward", 0.0) for row in rows]),
            "terminateds": torch.tensor([row.get("terminated", True) for row in rows]),
            "answers": None,
        }
        return answer | self._parts

    def _rewards(self, rewards):
        if not isinstance(rewards[0], dict):
            return torch.tensor(rewards)
        return {name: torch.tensor([row[name] for row in rewards]) for name in rewards[0]}


def turn(role, text, **more):
    return {"role": role, "content": text, "token_ids": tokens_of(text), **more}


def batch_of(questions, *, tasks="sum", more=(), **columns):
    """Return a batch with one user turn per question; ``more`` are the following sums."""
    count = len(questions)
    logs = [[turn("user", question)] for question in questions]
    tasks = [tasks] * count if isinstance(tasks, str) else list(tasks)
    return BatchedDataDict(
        {
            "message_log": logs,
            "length": torch.tensor([len(question) for question in questions]),
            "loss_multiplier": torch.ones(count),
            "task_name": tasks,
            "extra_env_info": [{"more": list(more)} for _ in questions],
            "idx": list(range(count)),
            **columns,
        }
    )


def roll_out(form, generator, batch, env=None, **options):
    """Run a rollout; ``env`` serves the task "sum", unless it is a dict of tasks."""
    env = Local(Arithmetic()) if env is None else env
    return form(
        generator,
        batch,
        CharTokenizer(),
        env if isinstance(env, dict) else {"sum": env},
        **{"max_seq_len": 200, "max_rollout_turns": 4, **options},
    )


def config(*, max_turns=4, max_seq_len=200, multiple=1, **sections):
    """Return the part of a trainer's configuration that a rollout uses."""
    master = {
        "policy": {
            "generation": {"backend": "vllm", "vllm_cfg": {"async_engine": False}},
            "max_total_sequence_length": max_seq_len,
            "make_sequence_length_divisible_by": multiple,
        },
        "grpo": {"max_rollout_turns": max_turns},
        "env": {"should_use_nemo_gym": False},
    }
    for name, values in sections.items():
        master[name] = master[name] | values
    return master


class HostingActor(SyncRolloutActor):
    """Actor that starts the in-memory store of its process, and reads from it."""

    def __init__(self, *args):
        self.store = InMemoryDataPlaneClient(DP_CFG)
        self.store.register_partition("train", ["input_ids"], 64, ["train"])
        super().__init__(*args)

    def read(self, meta, fields):
        from column_io import read_columns

        return dict(read_columns(self.store, meta, fields))


def texts(log):
    return [(turn["role"], turn["content"]) for turn in log]
