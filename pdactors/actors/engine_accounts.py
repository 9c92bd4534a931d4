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
    from pdactors.engine.step import Outcome
    from pdactors.kv.loans import Loans


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
        blocks_lacking=engine.blocks_lacking(),
        prompt_tokens_computed=engine.num_computed,
        num_preempted=engine.num_preempted,
        prefill_use=prefill,
        decode_use=decode,
        way=model.description,
    )


def token(actor: EngineActor, outcome: Outcome) -> Token:
    """Describe a token for the gateway; the first one of each phase says how the phase went."""
    sequence, sampled = outcome.sequence, outcome.sampled
    index = len(sequence.tokens) - 1
    prefill = decode = None
    if index == 0:
        prefill = PrefillPart(sequence.num_cached, sequence.received_s, sequence.begin_s, actor.clock())
    elif index == 1 and sequence.handle is not None:
        decode = DecodePart(
            sequence.path, sequence.sent_s, sequence.adopted_s, sequence.path_reason, sequence.handle.codec
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
    """Add to what every actor reports: requests held, leases given, and what is wrong with the books."""
    faults = []
    try:
        actor.check()
    except InvariantError as error:
        faults.append(error.message)
    sequences = (*actor.engine.running, *actor.engine.waiting)
    return msgspec.structs.replace(
        plain,
        requests=tuple(s.request for s in sequences),
        leases=lease_infos(actor, actor.loans),
        faults=tuple(faults),
    )
