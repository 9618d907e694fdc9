"""The words of releasing: versions, gates, canaries and who is drawn into them, releases, alarms, licences and news."""
