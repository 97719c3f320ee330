"""What everstep exists for: views, the step transaction, links, heal, spares. Knows nothing of losses or models."""
