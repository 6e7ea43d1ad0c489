"""What is plugged into a unit's forward and backward, or stands on the public verbs of units."""
