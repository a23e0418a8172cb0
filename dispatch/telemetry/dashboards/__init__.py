"""What Prometheus and Grafana are given: alert rules, and a dashboard to import. Printed by `dispatch metrics`."""
