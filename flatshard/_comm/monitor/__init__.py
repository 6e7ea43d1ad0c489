"""What notices that ranks do different things: compared before a collective, and watched while they wait."""
