"""One line fine-tunes a small model of transformers on a jsonl with its tokenizer: losses and exported folder beside plain transformers.

    python scripts/check_finetuning.py                                    Llama, Qwen-MoE and GPT-2, about 2 minutes on two cores
    python scripts/check_finetuning.py --models Mixtral --layouts tp2 ep2

The line is `python run.py model=hf model.path=MODEL data.path=texts.jsonl data.tokenizer=MODEL` with a layout, on two ranks in fp32. Beside it
transformers and torch's AdamW train on the same sequences in one process. Per layout: the largest relative difference of a step's loss (the
bound is 1e-5), and that of the logits of the exported folder, read by `from_pretrained`, from the plain model's after training, relative to the
largest logit (the bound is 1e-4, see tests/hf/finetuning.py). Exit code 1 if one misses its bound.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.hf.finetuning import LAYOUTS, by_command, by_transformers, write_model, write_texts
from tests.parallel.topology.families import FAMILIES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=["Llama", "Qwen2Moe", "GPT2"], metavar="NAME")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="NAME")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    faults = 0
    print("| model | layout | losses | logits of the exported folder |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        texts = write_texts(work / "texts.jsonl")
        for family in options.models:
            model = write_model(work / family, family=family, texts=texts)
            expected = by_transformers(model, texts=texts, work=work)
            for layout in options.layouts:
                if layout == "ep2" and not family.endswith(("Moe", "Mixtral")):
                    continue  # no experts
                off = by_command(model, layout=layout, texts=texts, work=work, expected=expected)
                faults += not off.holds
                print(f"| {family} | {layout} | {off.loss:.0e} | {off.logit:.0e} |", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
