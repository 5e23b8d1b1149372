"""Which keys of the data have an effect in which runs."""

from ztk.config.align_effects import reads_lines, reads_records
from ztk.config.effect import Effect
from ztk.config.schema import DataName
from ztk.config.text import TEXT, TRAIN, reads_documents

DATA_EFFECTS = (
    Effect(
        keys=("data.path",),
        when=lambda c, m: c.data.name in (DataName.files, DataName.prompts) or reads_records(c),
        only="data=files, prompts, chat or preferences",
        required=False,
    ),
    Effect(
        keys=("data.tokenizer",),
        when=lambda c, m: c.data.name in TEXT or (reads_lines(c) and c.data.path is not None),
        only="data=stdlib or data=files, and data=chat, data=preferences or data=prompts with data.path",
    ),
    Effect(
        keys=("data.vocab_size",),
        when=lambda c, m: c.data.name in TEXT and c.data.tokenizer == TRAIN,
        only="data.tokenizer=train",
    ),
    Effect(
        keys=("data.field", "data.on_error"),
        when=lambda c, m: c.data.name is DataName.files and reads_documents(c),
        only="data=files with jsonl, parquet or compressed files, data.mixture, or another data.tokenizer than bytes",
    ),
    Effect(keys=("data.mixture",), when=lambda c, m: c.data.name is DataName.files, only="data=files", required=False),
    Effect(
        keys=("data.validation_fraction",),
        when=lambda c, m: (
            c.data.name in (DataName.stdlib, DataName.files) or (reads_records(c) and c.data.path is not None)
        ),
        only="data=stdlib or data=files, and data=chat or data=preferences with data.path",
    ),
    Effect(
        keys=("data.packing",),
        when=lambda c, m: c.task.name in ("pretrain", "plan") and reads_documents(c),
        only="task=pretrain with documents: jsonl, parquet or compressed files, data.mixture, or another data.tokenizer than bytes",
    ),
)
