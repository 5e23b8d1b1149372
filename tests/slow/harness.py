"""Tasks of lm-evaluation-harness in local files, and its results for each of their documents."""

import json
from pathlib import Path
from typing import Any

CHOICE, ROLLING, ANSWER = "local_choice", "local_rolling", "local_answer"
_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
{rest}
"""
_KINDS = {
    CHOICE: """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
""",
    ROLLING: """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity}]
""",
    ANSWER: """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["%s"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def write_tasks(folder: Path, *, documents: list[dict[str, Any]], stop: str) -> Path:
    """Tasks over `documents`, which have a question, choices and the label of the right one. stop: ends an answer."""
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    for name, rest in _KINDS.items():
        rest = rest.replace("%s", stop)
        (folder / f"{name}.yaml").write_text(_TASK.format(name=name, data=data, rest=rest), encoding="utf-8")
    return folder


def evaluated(model: str, *, arguments: dict[str, Any], tasks: list[str], folder: Path, chat: bool = False) -> dict:
    """Task -> the model's result for each document, and the metrics."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=tasks,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        batch_size=4,
        device="cpu",
        bootstrap_iters=0,
        apply_chat_template=chat,
        log_samples=True,
    )
    return {
        name: (
            [sample["filtered_resps"] for sample in sorted(samples, key=lambda one: one["doc_id"])],
            found["results"][name],
        )
        for name, samples in found["samples"].items()
    }
