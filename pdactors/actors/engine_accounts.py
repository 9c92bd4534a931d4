"""What an engine says of itself, in heartbeats and when it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdactors.actors.spec import ENGINES
from pdactors.errors import InvariantError
from pdactors.messages import DecodePart, LeaseInfo, Load, PrefillPart, Report, Token

if TYPE_CHECKING:
    from pdactors.actors.actor import Actor
    from pdactors.actors.engine import EngineActor
    from pdactors.engine.sequence import Sequence
    from pdactors.engine.step import Outcome, Step
    from pdactors.kv.loans import Loans
    from pdactors.observe.trail import Trail


def load(actor: EngineActor) -> Load:
    """Describe what there is to do, what memory holds, and how steps went."""
    engine, model = actor.engine, actor.model
    sequences = [*engine.running, *engine.waiting]
    borrowed = {block for s in sequences for block in (s.borrowed or s.lent.values())}
    prefill, decode = actor.steps.uses()
    here = sum(m.role in ENGINES and m.node == actor.spec.node for m in actor.fleet.members)
    return Load(
        running=len(engine.running),
        waiting=len(engine.waiting),
        pending_tokens=sum(s.num_pending for s in sequences if s.is_prompt),
        max_sequences=actor.spec.config.engine.max_batch,
        max_blocks=actor.extents.max_blocks(max(here, actor.spec.num_engines) + actor.spec.config.moves_kv),
        blocks=msgspec.structs.replace(actor.pool.account(), leased_in=len(borrowed)),
        step_ms=actor.steps.times(),
        blocks_lacking=actor.blocks_lacking(),
        prompt_tokens_computed=engine.num_computed,
        num_preempted=engine.num_preempted,
        prefill_use=prefill,
        decode_use=decode,
        way=model.description,
        busy_s=round(actor.steps.busy_s, 3),
    )


def note_admission(trail: Trail, sequence: Sequence, now: float) -> None:
    """Note that a sequence runs from now on; `again` after it was preempted."""
    again = {"again": sequence.num_admitted - 1} if sequence.num_admitted > 1 else {}
    trail.note(sequence.request, "admitted", now, None, sequence.attempt, tokens_ready=sequence.num_stored, **again)


def note_step(trail: Trail, step: Step, began_s: float, ended_s: float) -> None:
    """Note a step that has run, before its results are taken in."""
    batch, decoding = len(step.portions), []
    for sequence, num_tokens in step.portions:
        if sequence.is_prompt:
            trail.note(sequence.request, "chunk", began_s, ended_s, sequence.attempt, tokens=num_tokens, batch=batch)
        else:
            decoding.append(sequence.request)
    if decoding:
        trail.step(decoding, began_s, ended_s, batch)


def token(actor: EngineActor, outcome: Outcome) -> Token:
    """Describe a token for the gateway; the first one of each phase says how the phase went."""
    sequence, sampled = outcome.sequence, outcome.sampled
    index = len(sequence.tokens) - 1
    prefill = decode = None
    if index == sequence.num_given and sequence.handle is None:
        now = actor.clock()
        prefill = PrefillPart(sequence.num_cached, sequence.received_s, sequence.begin_s, now)
        actor.trail.note(sequence.request, "first token", now, None, sequence.attempt)
    elif index == sequence.num_given and sequence.handle is not None:
        handle = sequence.handle
        decode = DecodePart(
            sequence.path,
            sequence.sent_s,
            sequence.adopted_s,
            sequence.path_reason,
            handle.codec,
            sequence.num_pruned,
        )
    return Token(
        sequence.request,
        sequence.attempt,
        index,
        sampled.token_id,
        finish=outcome.finish,
        logprob=sampled.logprob,
        top=sampled.top,
        prefill=prefill,
        decode=decode,
        sampled_s=actor.clock() if actor.spec.config.engine.stamp_tokens else None,
    )


def lease_infos(actor: Actor, loans: Loans) -> tuple[LeaseInfo, ...]:
    """Describe what an actor lends."""
    names = {member.slot: member.name for member in actor.fleet.members if member.node == actor.spec.node}
    now = actor.clock()
    return tuple(
        LeaseInfo(
            lessor=actor.spec.name,
            holder="" if lease.holder_slot is None else names.get(lease.holder_slot, f"slot {lease.holder_slot}"),
            request=lease.request,
            attempt=lease.attempt,
            num_blocks=len(lease.blocks),
            expires_s=round(lease.expires_s - now, 3),
        )
        for lease in loans.live()
    )


def report(actor: EngineActor, plain: Report) -> Report:
    """Add to what every actor reports: requests held, leases given, steps, and what is wrong with the books."""
    faults = []
    try:
        actor.check()
    except InvariantError as error:
        faults.append(error.message)
    return msgspec.structs.replace(
        plain,
        requests=actor.requests(),
        leases=lease_infos(actor, actor.loans),
        faults=tuple(faults),
        steps=actor.steps.counts(),
    )
