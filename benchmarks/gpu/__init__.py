"""What ``make gpu`` runs."""
