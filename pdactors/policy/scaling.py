"""Which engines may go and come while the cluster runs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pdactors.messages import Member, Role, Scale, State

ENGINES: tuple[Role, ...] = ("prefill", "decode", "worker")


class Crew:
    """The engines of a fleet, and which of them are on their way out."""

    def __init__(self, members: Mapping[str, Member], draining: Collection[str], *, can_migrate: bool) -> None:
        self._members = members
        self._draining = draining
        self._can_migrate = can_migrate

    def engines(self, role: Role, *states: State) -> list[Member]:
        """Return the engines of a role that are in one of these states and to stay."""
        known = self._members.values()
        return [m for m in known if m.role == role and m.state in states and m.name not in self._draining]

    def drain_objection(self, name: str) -> str:
        """Say why an engine cannot be drained; "" if it can."""
        member = self._members.get(name)
        if member is None or member.role not in ENGINES:
            known = sorted(other.name for other in self._members.values() if other.role in ENGINES)
            return f"no engine is called {name}; there are {', '.join(known)}"
        if name in self._draining:
            return ""
        others = [m for m in self.engines(member.role, "ready") if m.name != name]
        if not others:
            return f"{name} is the last {member.role}; scale up before it is drained"
        return self._stranded(member.node, member.role, sum(m.node == member.node for m in others))

    def scale_objection(self, message: Scale, roles: Collection[str], mode: str) -> str:
        """Say why a node cannot have so many engines of a role; "" if it can."""
        if message.role not in roles:
            return f"mode {mode} has {' and '.join(roles)} engines, no {message.role}"
        if not any(m.role == "supervisor" and m.node == message.node for m in self._members.values()):
            return f"no node is called {message.node}"
        if not message.count and all(m.node == message.node for m in self.engines(message.role, "ready")):
            return f"at least one {message.role} is needed"
        return self._stranded(message.node, message.role, message.count)

    def _stranded(self, node: str, role: Role, count: int) -> str:
        """Object to prompts that nobody could decode: without migration decode stays on the prefill's node."""
        if self._can_migrate or role == "worker":
            return ""
        here = {other: self._here(node, other) for other in ("prefill", "decode")} | {role: count}
        if here["prefill"] and not here["decode"]:
            return f"prefill engines of {node} need a decode engine there: KV does not move between nodes"
        return ""

    def _here(self, node: str, role: Role) -> int:
        return sum(m.node == node for m in self.engines(role, "ready", "starting"))
