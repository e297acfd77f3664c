"""Mistakes to put into the model of the pipeline, by the generations that can make them."""

from __future__ import annotations

#: The mistake and what it is in the code.
BUGS = {
    "sm90 sm100": {
        "sums_not_acquired": "the owner's wait is of this CTA's scope: reads of peers' sums may go before it",
        "no_wait_for_sums": "the owner does not wait for peers' sums",
        "ends_before_sums": "the owner ends without having waited for what peers send",
        "no_cluster_wait": "a rank sends before it knows that its peers have begun",
        "tokens_before_pdl_wait": "the token producer does not wait for the previous kernel",
        "phase_not_flipped": "the weight producer's phase stays as it was when the barriers begin anew",
        "barriers_of_the_shorter_ring": "a producer of the longer ring waits for a barrier that stands for another stage",
        "armed_for_too_few": "the barrier for peers' sums expects fewer bytes than they send",
        "map_on_another_stream": "the weight's tensor map is in memory, its upload in a stream that nothing orders",
        "map_not_acquired": "the weight's tensor map is in memory, and no fence.proxy.tensormap precedes its use",
        "barriers_unfenced": "the cluster barrier comes before the barriers are there",
    },
    "sm90": {
        "released_too_early": "a stage is given back while its own wgmma reads it",
        "asked_before_the_phase_is_flipped": "the next stage is asked for in the phase that its barrier has left",
    },
    "sm100": {
        "released_by_arrival": "a stage is given back by a plain arrival, not by tcgen05.commit",
        "one_pointer_barrier": "one barrier for address and release, and no wait for its phase 0 by the multiplying warp",
        "no_fence_behind_accumulated": "no tcgen05.fence::after_thread_sync: the load may go before the wait",
        "no_fence_behind_drained": "the same of the deallocation",
        "no_fence_before_drained": "no tcgen05.fence::before_thread_sync: the load may go behind the arrival",
        "no_fence_before_allocated": "the same of the allocation",
        "no_fence_behind_full": "a product may go before the wait for its stage",
        "freed_before_read": "the multiplying warp does not wait for the readers",
        "next_kernel_before_allocation": "dependents are let go before this CTA has its tensor memory",
        "idle_commits": "a commit that nobody waits for arrives when the CTA may have ended",
        "address_not_waited_for": "a warpgroup reads the address before it is there",
        "sums_kept": "the first product adds to what is in tensor memory",
    },
}


#: What the code could be and is not, and is right all the same: how public kernels are repaired.
HARMLESS = {
    "sm90 sm100": {"map_acquired": "the weight's tensor map is in memory, uploaded in this stream, and acquired"},
    "sm100": {"one_pointer_barrier_repaired": "one barrier for address and release, and a wait for its phase 0"},
}
