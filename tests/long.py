"""Tests that take long: `pytest --slow` runs all of them, an ordinary run leaves the first list out and takes a part of the second.

Each has shorter neighbours in the ordinary run. A test that is named on the command line with `::` always runs.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable

# Files and functions. tests/test_quick.py finds entries that match nothing.
LONG = (
    "tests/cli/test_calls.py::test_a_quick_sweep_returns_its_frames_goes_on_and_has_the_bits_of_runs_of_their_own",
    "tests/cli/test_calls.py::test_an_interrupt_ends_the_run_and_keeps_the_kernel_and_the_ranks_end_with_it",
    "tests/cli/test_sweep.py::test_a_killed_job_goes_on_from_its_checkpoint_to_the_same_bits",
    "tests/cli/test_sweep.py::test_repeats_are_interleaved_and_two_commands_exclude_each_other",
    "tests/cli/test_wheel.py::test_its_help_and_exit_codes_equal_run_pys",
    "tests/documents/test_tutorials.py::test_serve",
    "tests/experiments/test_distill.py::test_losses_have_the_same_bits_at_every_stage_and_tier",
    "tests/experiments/test_elastic.py::test_a_pipeline_goes_on_with_as_many_ranks_as_its_stages_allow",
    "tests/experiments/test_elastic.py::test_torchrun_goes_on_with_more_ranks_and_starts_them_again",
    "tests/experiments/test_evaluation_engine.py::test_a_run_with_experts_and_an_average",
    "tests/experiments/test_faults.py::test_what_was_saved_before_a_kill_continues_to_the_same_bits",
    "tests/experiments/test_serve.py::test_a_certificate_makes_it_https",
    "tests/experiments/test_serve.py::test_a_rank_that_dies_ends_the_process_in_time_whatever_the_other_does",
    "tests/hf/test_scripts.py::test_a_fine_tuning_script_by_the_runner",
    "tests/hf/test_scripts.py::test_accelerate_launch",
    "tests/hf/test_trl.py::test_grpo_generates_and_learns_the_same_at_stages_2_and_3",
    "tests/inference/test_own_modules.py::test_random_schedules_over_blocks_change_no_bit",
    "tests/inference/test_room.py::test_random_schedules_in_little_memory_change_no_bit",
    "tests/parallel/topology/test_quantized_collectives.py::test_training_goes_on_with_all_three",
    "tests/planner/test_fits.py::test_what_the_program_proposes_fits",
    "tests/planner/test_here.py::test_ranks_measure_together",
    "tests/report/test_tracker.py::test_tensorboard_has_the_rows_of_the_run_also_after_it_was_resumed",
    "tests/test_examples.py::test_a_run_resumes_under_another_layout",
)

# Functions with many cases, and which part of the cases an ordinary run takes: every second, third, ...
SAMPLED = {
    "tests/checkpoint/test_compact.py::test_a_resumed_run_has_the_same_bits_in_another_layout": 3,
    "tests/checkpoint/test_resume.py::test_losses_and_weights_have_the_same_bits": 3,
    "tests/checkpoint/test_saving.py::test_a_failed_save_raises_on_all_ranks_and_harms_nothing": 2,
    "tests/cli/test_run.py::test_a_sweep_names_a_file_that_is_cut": 2,
    "tests/cli/test_run.py::test_torchrun_makes_one_folder_and_shows_the_error": 2,
    "tests/config/test_config.py::test_every_option_composes": 3,
    "tests/deepspeed/serving/test_streaming.py::test_every_rank_has_its_own_text": 2,
    "tests/deepspeed/test_checkpointing.py::test_the_documents_block_changes_no_bit": 2,
    "tests/deepspeed/test_torch_optimizers.py::test_every_stage_and_tier_has_torchs_bits": 2,
    "tests/deepspeed/test_written.py::test_what_is_written_between_steps_counts_or_is_an_error": 2,
    "tests/documents/test_000_and_001.py::test_document_000": 2,
    "tests/documents/test_002_configurations.py::test_document_003": 2,
    "tests/documents/test_002_configurations.py::test_precision": 2,
    "tests/documents/test_002_configurations.py::test_zero_and_schedules": 2,
    "tests/experiments/test_alignment.py::test_losses_have_the_same_bits_at_every_stage_and_tier": 2,
    "tests/experiments/test_alignment.py::test_losses_of_divided_models_are_those_of_one_rank": 2,
    "tests/experiments/test_alignment.py::test_precision_and_recomputation": 2,
    "tests/experiments/test_faults.py::test_a_killed_rank_stops_the_run_and_is_named": 2,
    "tests/experiments/test_faults.py::test_an_interrupt_saves_the_step_and_names_the_line_that_resumes": 2,
    "tests/hf/test_families.py::test_a_cell_agrees_with_plain_transformers": 2,
    "tests/hf/test_rollouts.py::test_rollouts_have_the_trainers_bits_at_every_stage": 2,
    "tests/hf/test_sequences.py::test_losses_equal_one_rank": 2,
    "tests/hf/test_trl.py::test_losses_are_those_without_deepspeed": 3,
    "tests/inference/test_adapters.py::test_mixed_requests_have_the_bits_of_merged_models": 2,
    "tests/inference/test_adapters.py::test_two_ranks_cut_adapters_as_they_cut_the_base": 2,
    "tests/inference/test_blocks.py::test_random_schedules_change_no_bit": 2,
    "tests/inference/test_exactness.py::test_random_schedules_change_no_bit": 2,
    "tests/inference/test_quantised.py::test_random_schedules_change_no_bit": 2,
    "tests/inference/test_streaming.py::test_streamed_layers_change_no_bit_and_their_bytes_are_counted": 2,
    "tests/kernels/test_adamw_variants.py::test_cuts_equal_the_full": 2,
    "tests/kernels/test_kept_launches.py::test_a_key_without_one_of_its_values_is_found": 2,
    "tests/kernels/test_ops.py::test_kernel_matches_reference": 3,
    "tests/kernels/test_position_independence.py::test_cuts_equal_the_full": 2,
    "tests/nn/test_decoder.py::test_forward_and_gradients_equal_the_plain_implementation": 2,
    "tests/notebooks/test_notebooks.py::test_the_quick_form_holds": 4,
    "tests/parallel/moe/test_parallel.py::test_experts_go_with_every_other_axis": 4,
    "tests/parallel/moe/test_parallel.py::test_fp32_equals_the_one_rank_run": 2,
    "tests/parallel/moe/test_parallel.py::test_stages_and_tiers_give_the_same_bits": 2,
    "tests/parallel/recompute/test_run.py::test_every_bit_is_as_without": 4,
    "tests/parallel/recompute/test_stages.py::test_no_stage_sees_a_difference": 2,
    "tests/parallel/topology/test_absent.py::test_middle_ranks_need_no_micro_batches": 2,
    "tests/parallel/topology/test_checkpoints.py::test_any_topology_to_any_topology": 8,
    "tests/parallel/topology/test_context.py::test_losses_and_norms_equal_one_rank": 2,
    "tests/parallel/topology/test_context.py::test_output_and_gradients_equal_one_rank": 2,
    "tests/parallel/topology/test_documents.py::test_layouts_compute_the_same": 2,
    "tests/parallel/topology/test_layouts.py::test_within_a_layout_no_stage_and_no_tier_changes_a_bit": 2,
    "tests/parallel/topology/test_matrix.py::test_a_step_in_16_bits_is_as_exact_as_on_one_rank": 4,
    "tests/parallel/topology/test_matrix.py::test_every_layout_equals_one_rank": 3,
    "tests/parallel/topology/test_shares.py::test_each_element_of_state_is_on_one_rank": 2,
    "tests/parallel/topology/test_weights.py::test_uneven_parts_train_like_one_rank": 2,
    "tests/planner/test_chains.py::test_a_step_has_no_eager_chain_of_more_than_two": 2,
    "tests/planner/test_chains.py::test_one_launch_updates_a_bucket_whatever_groups_it_has": 2,
    "tests/planner/test_combinations.py::test_a_sample_of_combinations_runs": 9,
    "tests/planner/test_plan.py::test_a_plan_has_the_bytes_of_the_run": 2,
    "tests/planner/test_repeating.py::test_counts_equal_a_complete_trace": 2,
    "tests/rl/rollout/test_ahead.py::test_a_resumed_run_and_one_that_waits_equal_the_one_that_overlaps": 2,
    "tests/rl/rollout/test_environments.py::test_a_run_resumed_between_updates_equals_the_uninterrupted_one": 2,
    "tests/rl/rollout/test_layouts.py::test_losses_of_divided_models_are_those_of_one_rank": 2,
    "tests/rl/rollout/test_memory.py::test_a_rollouts_memory_equals_the_formula": 2,
    "tests/rl/rollout/test_runs.py::test_samples_and_losses_have_the_same_bits_in_every_layout": 3,
    "tests/rl/rollout/test_runs.py::test_the_first_samples_do_not_depend_on_the_number_of_ranks": 2,
    "tests/rl/rollout/test_sources.py::test_policy_and_reference_start_from_another_run": 2,
    "tests/scripts/test_published_runs.py::test_torchtitans_runs_take_as_long_as_planned": 2,
    "tests/test_examples.py::test_it_learns": 3,
    "tests/zero/test_average.py::test_the_average_is_the_plain_one_at_every_stage_and_tier_and_training_keeps_its_bits": 2,
    "tests/zero/test_behaviour.py::test_a_nan_gradient_on_one_rank_ends_all_and_is_named": 2,
    "tests/zero/test_behaviour.py::test_accumulated_micro_batches_equal_one_batch": 2,
    "tests/zero/test_behaviour.py::test_no_sync_moves_no_gradient_and_changes_no_result": 2,
    "tests/zero/test_behaviour.py::test_recomputation_changes_nothing": 2,
    "tests/zero/test_bit_identity.py::test_every_optimizer_gives_the_same_bits": 2,
    "tests/zero/test_bit_identity.py::test_every_stage_and_tier_gives_the_same_bits": 2,
    "tests/zero/test_compact.py::test_bytes_that_are_kept": 2,
    "tests/zero/test_compact.py::test_every_stage_and_tier_gives_the_same_bits": 3,
    "tests/zero/test_compact.py::test_what_a_script_writes_counts_at_every_stage_and_tier": 2,
    "tests/zero/test_costs.py::test_model_state_follows_the_formula": 4,
    "tests/zero/test_gradient_places.py::test_the_same_bits": 2,
    "tests/zero/test_random_layouts.py::test_bits_equal_stage_0": 6,
    "tests/zero/update/test_muon.py::test_every_stage_and_tier_gives_the_same_bits": 2,
}


def long_ones(nodeids: Iterable[str]) -> set[str]:
    """Tests that an ordinary run leaves out. Of a sampled function it takes the cases with the lowest hashes, so that which values meet which
    does not follow the order of parameters."""
    found, cases = set(), defaultdict(list)
    for nodeid in nodeids:
        function = nodeid.partition("[")[0]
        if function in SAMPLED:
            cases[function].append(nodeid)
        elif function in LONG or nodeid.partition("::")[0] in LONG:
            found.add(nodeid)
    for function, own in cases.items():
        own.sort(key=lambda nodeid: hashlib.blake2b(nodeid.encode()).digest())
        found.update(own[-(-len(own) // SAMPLED[function]) :])
    return found
