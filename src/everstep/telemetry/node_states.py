"""The nodes of a run as their agents see them, folded from the lead's events (for :mod:`everstep.telemetry.status`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.telemetry.events import Event


@dataclass
class NodeStatus:
    """``agent``: up, or lost (it died, or cannot be heard). ``since``: seconds since 1970, of that."""

    node: str
    agent: str
    sees: list[str]
    since: float
    signs: list[str] = field(default_factory=list)            # what is wrong with the node now, and what its kernel told
    stuck: list[str] = field(default_factory=list)            # ranks that do not move, and why
    quarantined: list[str] = field(default_factory=list)      # devices that are not used any more, and why


class Nodes:
    def __init__(self) -> None:
        self._nodes: dict[str, NodeStatus] = {}
        self._stuck: dict[str, tuple[str, str]] = {}  # worker -> node, line

    @property
    def now(self) -> list[NodeStatus]:
        for node in self._nodes.values():
            node.stuck = [line for on, line in self._stuck.values() if on == node.node]
        return [self._nodes[name] for name in sorted(self._nodes)]

    def take(self, event: Event) -> None:
        """One after the other, of everybody."""
        if event.event in ("expel", "retire", "death"):
            self._stuck.pop(event.get("worker", ""), None)
        elif event.event in ("apply", "vote", "heal_done"):
            self._stuck.pop(event.who, None)  # it moves again
        if event.who != "lead" or event.event not in ("agent", "health", "stuck", "quarantine"):
            return
        node = self._nodes.setdefault(event["node"], NodeStatus(event["node"], "up", [], event.t_wall))
        match event.event:
            case "agent":
                node.agent, node.since = event["state"], event.t_wall
                node.sees = list(event["sees"]) or node.sees
            case "health":
                line = (f"{event['device']}: " if event["device"] else "") + event["what"]
                if event["severity"] == "ok":
                    node.signs = [sign for sign in node.signs if not sign.endswith(line)]
                elif not any(sign.endswith(line) for sign in node.signs):
                    node.signs.append(f"{event['severity']}, {event['failure_class']}: {line}")
            case "stuck":
                self._stuck[event["worker"]] = node.node, f"rank {event['replica']}/{event['rank']} ({event['worker']}): stuck {event['what']}: {event['why']}"
            case "quarantine":
                node.quarantined.append(f"device {event['index']}: {event['why']}")


def describe(node: NodeStatus) -> list[str]:
    """Lines for people."""
    lines = [f"node {node.node}: agent {node.agent}, sees {', '.join(node.sees) or 'nothing'}"]
    lines += [f"  {sign}" for sign in node.signs] + [f"  {stuck}" for stuck in node.stuck]
    return lines + [f"  quarantined: {device}" for device in node.quarantined]
