"""The zoo: tiny models of every architecture, an oracle that reads no graph, and the pass."""
