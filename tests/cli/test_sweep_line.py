"""The command line of a sweep and the names of its jobs, without starting any."""

import sys

import pytest

from ztk.cli.folders import settle_folder
from ztk.cli.session import Session
from ztk.cli.sweep_line import read_line
from ztk.config import ConfigError, Machine, check_resumed, compose, job_hash, save, take_sweep_keys
from ztk.report.sweep import SweepBusy, SweepJob, SweepRecord, lock_sweep, read_sweep

CPU = Machine(gpus=0, cores=2)


def config_of(*overrides: str, folder: object = "/run"):
    return compose(*overrides, output_dir=folder, machine=CPU)


@pytest.mark.parametrize(
    "other",
    [
        ("logger=disabled",),
        ("launch.threads=7",),
        ("launch.timeout_seconds=5",),
        ("checkpoint.resume=auto",),
        ("optimizer.lr=3e-4",),  # the default, written out
    ],
)
def test_what_is_no_part_of_the_experiment_is_not_in_the_hash(other):
    first = config_of("data=synthetic", "optimizer.lr=0.0003")
    assert job_hash(config_of("data=synthetic", "optimizer.lr=0.0003", *other[:1])) == job_hash(first)


def test_every_choice_has_its_own_hash_and_no_folder_is_in_it(tmp_path):
    lines = [
        (),
        ("zero=stage3",),
        ("zero=stage3", "offload=nvme"),
        ("train.seed=1",),
        ("optimizer.lr=1e-3",),
        ("precision=fp32",),
    ]
    hashes = [job_hash(config_of(*line, folder=tmp_path)) for line in lines]
    assert len(set(hashes)) == len(lines)
    assert hashes == [job_hash(config_of(*line, folder=tmp_path / "other")) for line in lines]


def test_keys_that_a_sweep_varies_count(tmp_path):
    one, two = config_of("launch.threads=1"), config_of("launch.threads=2")
    swept = frozenset({"launch.threads"})
    assert job_hash(one) == job_hash(two)
    assert job_hash(one, counted=swept) != job_hash(two, counted=swept)
    (tmp_path / "a").mkdir()
    assert job_hash(config_of(f"checkpoint.resume={tmp_path / 'a'}")) != job_hash(config_of())


def recorded(folder, *overrides: str):
    """A run folder with a configuration and a checkpoint."""
    (folder / "checkpoints" / "step-000002").mkdir(parents=True)
    save(config_of(*overrides, folder=folder), path=folder / "config.yaml")
    return folder


@pytest.mark.parametrize("where", ["auto", "", "checkpoints", "checkpoints/step-000002"])
def test_a_checkpoint_of_other_numbers_is_refused(where, tmp_path):
    folder = recorded(tmp_path / "run", "optimizer.lr=3e-3", "train.seed=1")
    resume = "auto" if where == "auto" else folder / where
    target = folder if where == "auto" else tmp_path / "new"
    changed = ("optimizer.lr=2e-3", "train.seed=1", f"checkpoint.resume={resume}")
    with pytest.raises(
        ConfigError, match=r"optimizer\.lr=0\.002: the checkpoint's run has optimizer\.lr=0\.003"
    ) as caught:
        check_resumed(config_of(*changed, folder=target))
    assert len(caught.value.faults) == 1
    check_resumed(config_of(*changed, "checkpoint.allow_changes=true", folder=target))


@pytest.mark.parametrize(
    "changed",
    [
        ("zero=stage3", "offload=cpu"),
        ("train.steps=400",),
        ("topology=tp2", "train.global_batch_size=16"),
        ("logger=disabled", "checkpoint.every=4", "train.log_every=2"),
        ("recompute=full",),
        ("train.max_seconds=60", "train.until_loss=2"),
    ],
)
def test_what_leaves_the_numbers_may_change(changed, tmp_path):
    folder = recorded(tmp_path)
    check_resumed(config_of(*changed, "checkpoint.resume=auto", folder=folder))


def test_the_decay_of_wsd_follows_the_length_of_the_run_unless_it_is_given(tmp_path):
    folder = recorded(tmp_path, "scheduler=wsd", "train.steps=200")
    check_resumed(config_of("scheduler=wsd", "train.steps=400", "checkpoint.resume=auto", folder=folder))
    changed = ("scheduler=wsd", "train.steps=400", "scheduler.decay_steps=25", "checkpoint.resume=auto")
    with pytest.raises(
        ConfigError, match=r"scheduler.decay_steps=25: the checkpoint's run has scheduler.decay_steps=20"
    ):
        check_resumed(config_of(*changed, folder=folder))


def test_a_run_without_a_step_is_compared_with_nothing(tmp_path):
    """With a step it is: its rows would be replaced."""
    save(config_of("optimizer.lr=1e-3", folder=tmp_path), path=tmp_path / "config.yaml")
    config = config_of("checkpoint.resume=auto", folder=tmp_path)
    assert not settle_folder(config, is_restart=False, continued=lambda: config).is_done
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="optimizer.lr"):
        settle_folder(config, is_restart=False, continued=lambda: config)


@pytest.mark.parametrize(
    "words, reason",
    [
        (["sweep.retries=1"], "add -m"),
        (["-m", "sweep.retries=-1"], "must be 0 or more"),
        (["-m", "sweep.repeats=0"], "must be 1 or more"),
        (["-m", "sweep.repeats=1,2"], "one value"),
        (["-m", "sweep.repeats=2", "hydra/sweeper=basic"], "no effect with hydra/sweeper=basic"),
        (["-m", "sweep.repeats=2", "sweep.repeat_with=seeds", "train.seed=3"], "leave train.seed=3 out"),
        (["sweep.resume=/no/such/folder"], "no sweep.json"),
    ],
)
def test_keys_of_a_sweep_that_cannot_act_are_refused(words, reason):
    flags = [word for word in words if word.startswith("-")]
    with pytest.raises(ConfigError, match=reason):
        read_line([word for word in words if word not in flags], flags=flags)


@pytest.mark.parametrize(
    "words, varied",
    [
        (["sweep.repeats=2"], "seeds"),
        (["sweep.repeats=2", "train.seed=3"], "same_seed"),
        (["sweep.repeats=2", "sweep.repeat_with=same_seed"], "same_seed"),
        ([], "same_seed"),
    ],
)
def test_repeats_change_the_seed_unless_told(words, varied):
    """Losses of one seed have intervals of no width."""
    found = read_line(words, flags=["-m"])
    assert found.options.varied(found.words).value == varied


def record_of(*jobs: SweepJob) -> SweepRecord:
    common = {"command": "run.py -m zero=stage0,stage1", "commit": "abc", "repeats": 1, "repeat_with": "same_seed"}
    return SweepRecord(
        **common, flags=("-m",), words=("zero=stage0,stage1",), grid={"zero": ["stage0", "stage1"]}, jobs=jobs
    )


def test_a_recorded_sweep_gives_its_words_back(tmp_path):
    record = record_of(SweepJob(folder="a1", hash="a1", overrides=("zero=stage0",)))
    record.write(tmp_path)
    before = (tmp_path / "sweep.json").stat().st_mtime_ns
    assert read_sweep(tmp_path) == record
    record.write(tmp_path)
    assert (tmp_path / "sweep.json").stat().st_mtime_ns == before
    line = read_line([f"sweep.resume={tmp_path}"], flags=[])
    assert line.flags == ["-m"] and line.own_words == record.words
    assert line.words[-1] == f"hydra.sweep.dir='{tmp_path}'"
    assert take_sweep_keys(["sweep.list=true", "zero=stage1"]).words == ["zero=stage1"]


def test_one_command_per_sweep(tmp_path):
    with lock_sweep(tmp_path), pytest.raises(SweepBusy, match="another command"), lock_sweep(tmp_path):
        pass
    with lock_sweep(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_what_a_sweep_has_in_place_of_cfg_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", "zero=stage0,stage3", "--cfg", "job"])
    with pytest.raises(
        ConfigError, match="-m and --cfg exclude each other: choose one; sweep.list=true shows the jobs"
    ):
        Session()._prepare_arguments()


def test_quick_is_a_word_of_every_job():
    taken = take_sweep_keys(("zero=stage0,stage1", "sweep.quick=true"))
    assert taken.words == ["zero=stage0,stage1", "train.quick=true"]  # recorded, and so of a resumed sweep
    with pytest.raises(ConfigError, match="train.quick=false: sweep.quick=true sets it for every job"):
        take_sweep_keys(("train.quick=false", "sweep.quick=true"))


def test_a_quick_run_evaluates_nothing():
    quick = config_of("train.quick=true")
    assert quick.train.eval_every is None and quick.train.eval_batches is None
    assert job_hash(quick) != job_hash(config_of())
    for words in (("data=synthetic",), ("train.quick=true",)):  # "never" equals the default behaviour
        assert job_hash(config_of(*words, "train.eval_every=0")) == job_hash(config_of(*words))
    faults = [
        (("train.quick=true", "train.eval_every=5"), "train.eval_every=5 has no effect here"),
        (
            ("data=synthetic", "train.eval_every=5"),
            "train.eval_every=5 has no effect here, only with data=stdlib, files",
        ),
        (
            ("train.quick=true", "checkpoint.every=5", "checkpoint.keep_best=true"),
            "checkpoint.keep_best=true has nothing",
        ),
        (("train.quick=true", "train.until_loss=2.0"), "train.until_loss=2.0 has no effect here"),
        (("train.quick=true", "task=sft"), "train.quick=true has no effect here, only with task=pretrain"),
    ]
    for words, fault in faults:
        with pytest.raises(ConfigError) as caught:
            config_of(*words)
        assert any(line.startswith(fault) for line in caught.value.faults), caught.value.faults
