"""`Generator`: answers from a model, many sequences at a time, each as if it were alone.

Parameters have the dtype that the trainer computes in.
"""

import itertools
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from ztk.core.policies.inference import InferencePolicy
from ztk.core.runtime.comm import Comm
from ztk.core.runtime.host_memory import return_freed_memory
from ztk.inference.base import Model
from ztk.inference.graphs import graphs_of
from ztk.inference.memory import find_scales, shared_memory
from ztk.inference.model import InferenceModel
from ztk.inference.opening import Opening, ReadParameters, TrainingEngine, UnreadModel, settled
from ztk.inference.packed import Packed
from ztk.inference.parallel import Computing, Leading, follow
from ztk.inference.policy import Completion, Output, PromptLogprob, SamplingParams
from ztk.inference.probe import check_draws, check_model, settle_products
from ztk.inference.ranks import Ranks, computing, opening
from ztk.inference.requests import Request, Sequence, adapter_number, check_tokens, logprob_values
from ztk.inference.stepping import Stepper
from ztk.nn.low_rank import Adapter


class Generator:
    """Generates with the native decoder or a causal language model of transformers, on the CPU, in fp32 or with weights of 8 or 4 bits.

    adapters: LoRA adapters by name, for requests that name one: see [Note: Exact adapters] in ztk/inference/adapters.py.
    open_weights: opens the weights of a folder for `switch`, on every rank.
    comm: communicates between the ranks that share the model, each of which makes a generator. Defaults to one rank. The first one answers,
    the others call `follow`: see [Note: One broadcast per step] in ztk/inference/parallel.py.
    plan: with `policy.offload`, the use of the memory. model: a module, a training engine, whose weights are gathered (every rank
    calls it), a folder of packed weights, or one whose parameters are read one by one. On a CPU linear layers are
    copied in the processor's own layout, and embeddings and norms in fp32 are shared with the module. By kernels on the module's device
    all weights that need no other layout are shared. Call `load` after you change the weights. A sequence's tokens and log-probabilities
    depend only on the sequence, the weights and the seed.

    All calls may be made from several threads and in turns: a step computes the sequences of all callers, and each caller gets its own.

    Raises:
        ValueError: a model that the engine does not compute or that its ranks cannot divide, or a processor whose products differ by the
            number of rows.
        PeerLost: another of the ranks could not open it; the text has its reason.
    """

    def __init__(
        self,
        model: "nn.Module | TrainingEngine | Packed | UnreadModel",
        *,
        policy: InferencePolicy | None = None,
        comm: Comm | None = None,
        adapters: Mapping[str, Adapter] | None = None,
        open_weights: Callable[[str], AbstractContextManager[UnreadModel]] | None = None,
    ) -> None:
        started, chosen = time.perf_counter(), policy or InferencePolicy()
        self._ranks = None if comm is None or comm.size == 1 else Ranks(comm)
        self._open_weights = open_weights
        self._adapters = dict(adapters or {})
        with opening(self._ranks):
            self._opening = Opening(policy=chosen, ranks=self._ranks, adapters=self._adapters)
            opened = self._opening.open(model)
            self._model, self.plan, self._streamed = opened.model, opened.plan, opened.streamed
            self._packed_bytes = opened.packed_bytes
            if opened.streamed is not None and open_weights is not None:
                raise ValueError(
                    "serve.weights_path with layers that stream, which are final: leave offload out, or choose fewer bits so that they fit"
                )
            self.read = ReadParameters(None if opened.streamed is not None else model)
            self.policy = settled(chosen, plan=self.plan)
            self._subject, self.description = opened.subject, opened.subject.description
            self._lone = check_model(self._model)
            settle_products(self._model, exact=self._lone)
            self.max_len = min(self.policy.max_model_len or self.description.max_len, self.description.max_len)
        with opening(self._ranks):  # all have come so far, and agree on the memory's size
            if opened.streamed is None or self._model.placement.by_kernels:  # the processor's own products have one way
                check_draws(self._model)
            self._cache, self._scheduler = shared_memory(
                self._model, policy=self.policy, positions=self.max_len, plan=self.plan, ranks=self._ranks
            )
        leads = self._ranks is not None and self._ranks.comm.rank == 0
        self._computing = (
            Leading(self._model, cache=self._cache, ranks=self._ranks)
            if leads
            else Computing(self._model, cache=self._cache)
        )
        self._stepper = Stepper(
            self._computing,
            scheduler=self._scheduler,
            graphs=graphs_of(self._model, cache=self._cache),
            ranks=self._ranks,
            rows=self.policy.max_step_tokens or 0,
        )
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._is_stepping = False
        self._inboxes: dict[int, deque[Output] | None] = {}  # by request; None if only its sequences are read
        self._unclaimed: list[Output] = []  # of requests without an inbox, returned by the next `step`
        self._cancelled: deque[int] = deque()  # requests that end before the next step
        self._closed = False
        self._next: _Next | None = None  # weights that are read for `switch`
        self.opening_seconds = time.perf_counter() - started  # copies of layers, checks, a plan

    # Complete answers

    def generate(
        self,
        prompts: list[list[int]],
        *,
        sampling: SamplingParams | list[SamplingParams] | None = None,
        adapters: str | list[str | None] | None = None,
    ) -> list[list[Completion]]:
        """`sampling.n` answers to each prompt of token ids, in the order of the prompts. adapters: the name of one, or for each prompt one or
        None for the base.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, more tokens than the model takes, or an unknown adapter.
        """
        each = sampling if isinstance(sampling, list) else [sampling or SamplingParams()] * len(prompts)
        names = adapters if isinstance(adapters, list) else [adapters] * len(prompts)
        for given_kind, given in (("sampling parameters", each), ("adapters", names)):
            if len(given) != len(prompts):
                raise ValueError(f"{len(given)} {given_kind} for {len(prompts)} prompts: pass one, or one per prompt")
        numbers = [adapter_number(name, among=self._adapters) for name in names]
        for prompt, one in zip(prompts, each, strict=True):
            self._check(prompt, limit=one.max_tokens, biased=one.named_tokens)
        limits = [one.max_tokens for one in each]
        answers = self._finished(prompts, sampling=each, limits=limits, adapters=numbers)
        return [[sequence.completion() for sequence in sequences] for sequences in answers]

    def score(self, sequences: list[list[int]]) -> list[Tensor]:
        """The raw log-probability of every token given those before it: fp32 [len - 1] for each sequence.

        Raises:
            ValueError: an empty sequence, a token outside the vocabulary, or more tokens than the model takes.
            FloatingPointError: logits that are not finite.
        """
        return [logprob_values(scores) for scores in self._scored(sequences, top=0)]

    def score_ends(self, sequences: list[list[int]], *, counts: list[int]) -> list[float]:
        """For each sequence the sum of the raw log-probabilities of its last `counts` tokens. Raises as `score`."""
        found = self.score(sequences)
        return [float(own[len(own) - count :].double().sum()) for own, count in zip(found, counts, strict=True)]

    def score_tokens(self, sequences: list[list[int]]) -> list[list[PromptLogprob]]:
        """Scores like `score` and adds the likeliest token of every position: [len - 1] for each sequence.

        Raises:
            ValueError: the same as in `score`.
            FloatingPointError: logits that are not finite.
        """
        return self._scored(sequences, top=1)

    def _scored(self, sequences: list[list[int]], *, top: int) -> list[list[PromptLogprob]]:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=True, logprobs=top)
        for sequence in sequences:
            self._check(sequence, limit=0)
        each, zeros = [sampling] * len(sequences), [0] * len(sequences)
        computed = [one for [one] in self._finished(sequences, sampling=each, limits=zeros, adapters=zeros)]
        for number, sequence in enumerate(computed):
            if sequence.error is not None:
                raise FloatingPointError(f"sequence {number}: {sequence.error}")
        return [sequence.prompt_logprobs for sequence in computed]

    def embed(self, prompt: list[int], *, adapter: str | None = None) -> Tensor:
        """The mean of the last hidden states of `prompt`, of length 1: fp32 [C] on the CPU.

        Raises:
            ValueError: a prompt that `generate` refuses, or a model whose hidden states are not in this process's memory.
        """
        self._check(prompt, limit=0)
        if (model := self.own_model) is None:
            raise ValueError(
                "embeddings are computed where one process has all layers in memory, of the families that ztk computes itself"
            )
        options = {"adapter": adapter_number(adapter, among=self._adapters), "lock": self._lock}
        return model.embedding(prompt, rows=self.policy.max_step_tokens or len(prompt), **options)

    def stream(
        self, prompt: list[int], *, sampling: SamplingParams | None = None, adapter: str | None = None
    ) -> Iterator[Output]:
        """The tokens of one request as they are drawn. Closing the iterator cancels the request."""
        chosen, inbox = sampling or SamplingParams(), deque[Output]()
        own = adapter_number(adapter, among=self._adapters)
        self.check(prompt, sampling=chosen)
        with self._lock:
            number = self._enqueue(prompt, sampling=chosen, limit=chosen.max_tokens, adapter=own)[0].request_id
            self._inboxes[number] = inbox
        try:
            is_open = True
            while is_open:
                with self._lock:
                    if not inbox and self.is_open(number):
                        self._advance()
                    is_open = self.is_open(number)
                self._end_cancelled()
                while inbox:
                    yield inbox.popleft()
        finally:
            self.cancel(number)

    # Continuous batching

    def submit(self, prompt: list[int], *, sampling: SamplingParams, adapter: str | None = None) -> Request:
        """Queues a request; `step` computes it.

        Raises:
            ValueError: as `generate`.
        """
        self.check(prompt, sampling=sampling)
        own = adapter_number(adapter, among=self._adapters)
        with self._lock:
            first = self._enqueue(prompt, sampling=sampling, limit=sampling.max_tokens, adapter=own)[0]
        return Request(id=first.request_id, prompt=list(prompt), sampling=sampling, adapter=adapter)

    def check(self, prompt: list[int], *, sampling: SamplingParams) -> None:
        """Raises ValueError for a request that `submit` refuses. May be called from any thread."""
        self._check(prompt, limit=sampling.max_tokens, biased=sampling.named_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits into memory, prompt and answer."""
        return min(self.max_len, self._scheduler.slots.longest(self.max_len))

    @property
    def has_work(self) -> bool:
        """Whether a request is unanswered, or an output has not been returned."""
        return bool(self._unclaimed or self._scheduler.running or self._scheduler.waiting)

    def is_open(self, request_id: int) -> bool:
        """Whether the request has unfinished answers."""
        return request_id in self._stepper.sequences

    def is_begun(self, request_id: int) -> bool:
        """Whether an answer to the request has had room, or the request has ended."""
        return all(sequence.slot >= 0 for sequence in self._stepper.sequences.get(request_id, [])[:1])

    @property
    def cache_usage(self) -> float:
        """The used fraction of the memory for keys and values."""
        return self._scheduler.slots.usage

    @property
    def is_lost(self) -> bool:
        """Whether no further step can be computed, because a rank or the device is gone."""
        return self._stepper.lost

    @property
    def preempted(self) -> int:
        """Number of preemptions so far, in which a sequence's blocks were copied out to make room."""
        return self._scheduler.slots.preempted

    @property
    def reused_tokens(self) -> int:
        """Number of prompt tokens so far whose keys and values were reused from another sequence."""
        return self._scheduler.reused_tokens

    def step(self) -> list[Output]:
        """Computes one step of all sequences that have room in it, and returns the tokens drawn for requests of `submit`.

        A sequence whose own computation fails ends with an error, others go on: [Note: Whose error it is] in ztk/inference/stepping.py.
        """
        with self._lock:
            self._advance()
            found, self._unclaimed = self._unclaimed, []
        self._end_cancelled()
        return found

    def cancel(self, request_id: int) -> None:
        """Ends a request and frees its slots; at the end of the step that another thread computes. Unknown and ended ones are ignored."""
        self._cancelled.append(request_id)
        self._end_cancelled()

    def reset(self) -> None:
        """Ends all requests, and drops the keys and values of earlier ones. After an error of `step`, the next one can be computed."""
        with self._lock:
            self._stepper.reset()
            self._unclaimed.clear()

    def load(self, source: nn.Module | TrainingEngine) -> None:
        """Takes the weights of a module or a training engine of the same model, at any stage, without a disk. Every rank of the engine
        calls it.

        Raises:
            RuntimeError: requests are not answered yet, or layers are streamed.
            ValueError: the source lacks a parameter of this model.
        """
        with self._lock:
            with opening(self._ranks):  # the first rank alone has requests
                self._check_idle()
            with opening(self._ranks):
                model = self._opening.reopened(source, like=self._model, subject=self._subject)
                self.read = ReadParameters(source)
            self._replace(model)
            self._scheduler.slots.forget()

    def prepare(self, folder: str) -> Future[None]:
        """Begins to read the weights of `folder` on every rank, in a thread, next to the model that goes on computing; `switch` takes them then
        at once. Until then each rank has its part of both models, and its part of one tensor at a time.

        Between two steps, on the first rank, while the others `follow`. Returns a future that is done when this rank has read them, or could
        not. Raises RuntimeError as `switch`.
        """
        self._check_switch()
        with self._lock:
            if isinstance(self._computing, Leading):
                self._computing.prepare(folder)
            return self._prepare(folder).done

    def switch(self, folder: str, *, version: str) -> int:
        """Between two steps, takes the weights of `folder`, all of them or none. Requests under way go on with them: the tokens that they have
        stay, and keys and values are computed again. On the first rank, while the others `follow`. Reads the weights, unless `prepare` has.
        Returns the bytes that all ranks have read of them.

        Raises:
            RuntimeError: layers are streamed, or the generator was made without `open_weights`.
            ValueError: weights that do not fit the model, or are not finite. The old ones stay.
            ConnectionError: the process that has them is gone. The old ones stay.
        """
        self._check_switch()
        with self._lock:
            self._end_cancelled()
            if isinstance(self._computing, Leading):
                self._computing.switch(folder)
            taken = self._switch(folder)
            if isinstance(taken, Exception):
                raise taken
            self._scheduler.recompute()
            self._stepper.version = version
            return taken

    @property
    def ranks(self) -> int:
        """The number of ranks that divide the model."""
        return 1 if self._ranks is None else self._ranks.comm.size

    @property
    def version(self) -> str | None:
        """The version of the weights that `switch` took last, or None."""
        return self._stepper.version

    @property
    def own_model(self) -> InferenceModel | None:
        """The model that computes a step, of the families that ztk computes itself, if this process has all of it in memory, else None."""
        has_all = self._ranks is None and self._streamed is None
        return self._model if has_all and isinstance(self._model, InferenceModel) else None

    @property
    def adapters(self) -> Mapping[str, int]:
        """The adapters that requests may name, each with the bytes of its own copies of weights, which `weight_bytes` includes."""
        return {} if self._model.adapters is None else self._model.adapters.nbytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the linear layers and the head, including scales; for a packed folder, of its layers and the head."""
        if self._packed_bytes is not None:
            return self._packed_bytes
        return sum(product.nbytes for product in self._model.products())

    @property
    def streamed_bytes(self) -> int:
        """Bytes of layers that were read so far, including prefetched ones."""
        if self._streamed is None:
            return 0
        self._streamed.settle()
        return self._streamed.counters.read_bytes

    def close(self) -> None:
        """Ends the threads that move layers or blocks, and `follow` on the other ranks. No further step can be computed. Idempotent."""
        if self._streamed is not None:
            self._streamed.close()
        self._cache.close()
        if self.leads and not self._closed:
            self.dismiss()
        self._closed = True

    # Ranks that share the model

    @property
    def leads(self) -> bool:
        """Whether other ranks follow this one."""
        return isinstance(self._computing, Leading)

    @property
    def follows(self) -> bool:
        """Whether this rank only computes parts of another rank's steps, by `follow`."""
        return self._ranks is not None and not self.leads

    @torch.inference_mode()
    def follow(self) -> None:
        """On every rank but the first: computes its part of each step until the first one calls `close` or `dismiss`.

        Raises:
            PeerLost: the first rank is gone.
        """
        assert self._ranks is not None and self.follows, "a rank that follows"
        with computing(self._ranks):
            follow(self._computing, ranks=self._ranks, prepare=self._prepare, switch=self._switch)

    def dismiss(self) -> None:
        """On the first rank: ends `follow` on the others, so that all can call `load`; they may follow again."""
        assert isinstance(self._computing, Leading), "the rank that leads"
        self._computing.dismiss()

    def beat(self) -> None:
        """Notifies the other ranks that the first rank is idle. Does nothing on other ranks. Raises PeerLost if a rank is gone."""
        if isinstance(self._computing, Leading):
            with self._lock:
                self._computing.beat()

    def forget_prefixes(self) -> None:
        """Drops all reusable prefixes: later prompts are computed from their first token."""
        with self._lock:
            self._scheduler.slots.forget()

    # Parts

    def _check_switch(self) -> None:
        if self._streamed is not None or self._open_weights is None:
            raise RuntimeError("switch: make a Generator with open_weights and without offload")

    def _prepare(self, folder: str) -> "_Next":
        """On every rank: begins to read the weights of `folder`, in place of others that were not taken."""
        assert self._open_weights is not None, "`prepare` and `switch` have checked it"
        open_weights, like = self._open_weights, self._model

        def build() -> tuple[Model, int]:
            with open_weights(folder) as source:
                model = self._opening.reopened(source, like=like, subject=self._subject)
                return model, getattr(source.state, "read_bytes", 0)

        self._next = _Next(folder, build=build)
        return self._next

    def _switch(self, folder: str) -> int | Exception:
        """On every rank: takes the weights of `folder`, unless a rank cannot; returns that error, or the bytes that all ranks have read. Raises
        PeerLost."""
        following, self._next = self._next, None
        if following is None or following.folder != folder:
            following = self._prepare(folder)
            self._next = None
        model, error = following.result()
        nbytes = following.read_bytes
        if self._ranks is not None:
            found = self._ranks.gather(
                (None if error is None else str(error), isinstance(error, ConnectionError), nbytes)
            )
            for text, is_lost, _ in found:
                if error is None and text is not None:
                    error = ConnectionError(text) if is_lost else ValueError(text)
            nbytes = sum(each for _, _, each in found)
        if error is not None or model is None:
            return error or RuntimeError("the weights were not read")
        self._replace(model)
        return_freed_memory()  # the old weights'
        return nbytes

    def _replace(self, model: Model) -> None:
        """Computes with `model` from now on. A collective call of the ranks that share it."""
        self._model = model
        settle_products(model, exact=self._lone)
        find_scales(model, cache=self._cache)
        self._computing.model, self._stepper.graphs = model, graphs_of(model, cache=self._cache)

    def _check_idle(self) -> None:
        """Raises RuntimeError under the conditions of `load`."""
        if self._streamed is not None:
            raise RuntimeError("load: the weights are read from a packed folder; make a Generator without offload")
        if self.has_work:
            raise RuntimeError("load: requests are not answered yet; let them end, or cancel() them")

    def _check(self, prompt: list[int], *, limit: int, biased: Iterable[int] = ()) -> None:
        self.read.check()
        sizes = {"vocabulary": self.description.vocab_size, "max_len": self.max_len}
        check_tokens(prompt, limit=limit, biased=biased, **sizes)
        self._scheduler.slots.check(prompt=len(prompt), limit=limit)

    def _enqueue(self, prompt: list[int], *, sampling: SamplingParams, limit: int, adapter: int = 0) -> list[Sequence]:
        number = next(self._ids)
        sequences = [
            Sequence(
                request_id=number,
                sample=sample,
                sampling=sampling,
                tokens=list(map(operator.index, prompt)),
                prompt_length=len(prompt),
                limit=limit,
                adapter=adapter,
                state=None if sampling.grammar is None else sampling.grammar.begin(),
            )
            for sample in range(sampling.n)
        ]
        self._stepper.sequences[number] = sequences
        self._scheduler.waiting.extend(sequences)
        return sequences

    def _finished(
        self, prompts: list[list[int]], *, sampling: list[SamplingParams], limits: list[int], adapters: list[int]
    ) -> list[list[Sequence]]:
        """The sequences of each prompt, when all have ended. If a step fails, none of them stays in the queue."""
        with self._lock:
            answers = [
                self._enqueue(prompt, sampling=one, limit=limit, adapter=own)
                for prompt, one, limit, own in zip(prompts, sampling, limits, adapters, strict=True)
            ]
            numbers = [sequences[0].request_id for sequences in answers]
            self._inboxes.update(dict.fromkeys(numbers))
        everything = [sequence for sequences in answers for sequence in sequences]
        try:
            while any(sequence.finish_reason is None for sequence in everything):
                with self._lock:
                    if any(sequence.finish_reason is None for sequence in everything):
                        self._advance()
                self._end_cancelled()
        finally:
            for number in numbers:
                self.cancel(number)
        for sequence in everything:
            if sequence.cause is not None:
                raise sequence.cause
        return answers

    @torch.inference_mode()
    def _advance(self) -> None:
        """Runs one step and distributes its outputs to the callers. The caller holds the lock."""
        if self._is_stepping:
            raise RuntimeError("a step has begun in this thread: sampling.token_mask must not call the generator")
        self._end_cancelled()
        self._is_stepping = True
        try:
            outputs = self._stepper.step()
        finally:
            self._is_stepping = False
        for output in outputs:
            inbox = self._inboxes.get(output.request_id, self._unclaimed)
            if inbox is not None:
                inbox.append(output)

    def _end_cancelled(self) -> None:
        """Ends the requests of `_cancelled`. While another thread computes a step, does nothing: that thread calls it afterwards."""
        while self._cancelled and self._lock.acquire(blocking=False):
            try:
                if self._is_stepping:
                    return
                ended = {self._cancelled.popleft() for _ in range(len(self._cancelled))}
                for number in ended:
                    self._inboxes.pop(number, None)
                    self._stepper.cancel(number)
                self._unclaimed = [output for output in self._unclaimed if output.request_id not in ended]
            finally:
                self._lock.release()


class _Next:
    """A model that a thread builds from the weights of a folder."""

    def __init__(self, folder: str, *, build: Callable[[], tuple[Model, int]]) -> None:
        """build: returns the model and the bytes that were read."""
        self.folder, self.read_bytes = folder, 0
        self.done: Future[None] = Future()
        self._model: Model | None = None
        self._build: Callable[[], tuple[Model, int]] | None = build
        self._thread = threading.Thread(target=self._run, name="ztk-weights", daemon=True)
        self._thread.start()

    def result(self) -> tuple[Model | None, Exception | None]:
        """Waits for the model, or the error in its place."""
        self._thread.join()
        return self._model, self.done.exception()

    def _run(self) -> None:
        assert self._build is not None, "it has just begun"
        error: Exception | None = None
        try:
            self._model, self.read_bytes = self._build()
        except Exception as own:  # noqa: BLE001 - every rank learns of it in `switch`
            error = own
        self._build = None  # it holds the model before
        self.done.set_result(None) if error is None else self.done.set_exception(error)
